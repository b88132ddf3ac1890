"""What is not the same on both sides and no error of either: masks of logits, ways of hashing images.

The problem: a grammar gives another token, a release another hash of the same picture; a reader must learn of both, and
nobody be blamed. The idea: one sentence for each, with what differs and on which side. Not here: how it is told that
nobody is to blame (judge/flips.py, align/requests.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_accprobe.comparison.measure.measured import MeasuredUnit, Setting
from vllm_accprobe.comparison.result import PASS, SKIP, Pair
from vllm_accprobe.judge import flips


def masked(flipped: Sequence[dict[str, Any]]) -> list[str]:
    """What is said of flips that are no errors because something masked the logits: one sentence for each way."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for f in flipped:
        if f["why"] == flips.MASKED:
            sides = [f.get("masked", {}).get(side, []) for side in ("golden", "mine")]
            ways.setdefault(_mask_said(*sides), []).append(f)
    out = []
    for way, found in ways.items():
        more = f" and {len(found) - 1} more requests" if len(found) > 1 else ""
        first = f"request {found[0]['request']!r}, generated token {found[0]['ordinal']}{more}"
        out.append(f"{way} ({first}): each sampler took the best of what it was left, and what follows is not compared")
    return out


def _mask_said(golden: Sequence[str], mine: Sequence[str]) -> str:
    only = {"mine": [w for w in mine if w not in golden], "golden": [w for w in golden if w not in mine]}
    said = [f"by {' and '.join(words)} in {side} only" for side, words in only.items() if words]
    if not said:
        return f"logits were masked by {' and '.join(mine)} on both sides, otherwise in mine than in golden"
    return "logits were masked " + ", ".join(said)


def images(setting: Setting, units: Sequence[MeasuredUnit], pairs: Sequence[Pair]) -> list[str]:
    """What is said of images with other hashes: where everything that was computed of them agrees, only their hashes
    differ."""
    if not setting.other_images:
        return []
    vision = {u.key for u in units if u.vision}
    found = {p.status for p in pairs if (p.tap, p.role, p.call) in vision} - {SKIP}
    if not setting.rehashed or found != {PASS}:
        return [f"request {request!r} has different images" for request in setting.other_images]
    versions = [run.get("versions") for run in (setting.golden_run, setting.mine_run)]
    releases = [str(v["vllm"])[:40] if isinstance(v, dict) and "vllm" in v else "" for v in versions]
    by = f" (vLLM {releases[0]} and {releases[1]})" if all(releases) and releases[0] != releases[1] else ""
    return [f"image hashes differ in all requests that have images ({len(setting.other_images)}), and all that was "
            f"computed of the images agrees: another way of hashing{by}"]  # fmt: skip
