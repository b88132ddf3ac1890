"""References of FlashInfer's API, by its functions' names and order of arguments; the formulas are their families'."""
