"""References of the operators of Ascend's transformer boost library (ATB), from what each was created with.

Source of all: the parameters' public declarations (ATB's infer_op_params.h and train_op_params.h) and ATB's public
documents of the order of an operator's inputs and outputs; enumerations are by their numbers there. An operator whose
parameters were not recorded is judged by ATB's defaults only where nothing else could have run (operands.py).
"""
