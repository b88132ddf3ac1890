"""Short names of torch's dtypes."""

import torch

BRAIN, HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
INT, LONG, INT8, BYTE, E4M3 = torch.int32, torch.int64, torch.int8, torch.uint8, torch.float8_e4m3fn
