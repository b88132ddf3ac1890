"""What kind of floor an error breaks, by how much, and how likely an honest machine is to break it.

The problem: "too large" is worth as much as the limit is. A limit that follows from the operator's own numbers
convicts; one that follows from how errors usually are convicts but for chance; one that follows from how the same
operator fared elsewhere says that something is odd. The idea: each origin says which of the three it breaks.

- PROVED: a running error bound from the operator's own inputs. No order of summation and no luck of rounding breaks it,
  only a wrong kernel or one that computes in a lower precision [N. Higham, Accuracy and Stability of Numerical
  Algorithms, 2nd ed., sections 3.1 and 3.3].
- BEYOND_CHANCE: a bound that holds with a stated probability, because roundings behave as independent errors of mean
  zero [N. Higham and T. Mary, SIAM J. Sci. Comput. 41 (2019) A2815; I. Ipsen and H. Zhou, arXiv 1906.10465].
- UNLIKE_KIN: percentiles of this operator elsewhere: in the other layers, in other calls, in a calibration.
- BEHIND_A_ROUTER: none. A router that was not captured may have sent the rows to other experts at a near tie, behind
  which honest machines differ by far more than any limit (near_ties.py).

Not here: the floors themselves (constants.py, outliers.py; opcheck/).
"""

from __future__ import annotations

PROVED, BEYOND_CHANCE, UNLIKE_KIN = "proved", "beyond chance", "unlike its kin"
BEHIND_A_ROUTER = "behind an unseen router"
TIERS = (PROVED, BEYOND_CHANCE, UNLIKE_KIN, BEHIND_A_ROUTER)
"""The strongest first."""
