"""Lets a torchvision that was built for CUDA be imported beside a CPU torch. env.sh puts it into the test environment.

The problem: vision-language models import torchvision for its image transforms; where only the CUDA build can be
installed, its compiled library does not load on a CPU torch, and the import dies because the schema of
``torchvision::nms`` is unknown. The idea: define the two schemas just before torchvision is first imported; nothing
here is ever called. A ``.pth`` file imports this module at every start of Python, so it costs one finder and no torch.
Not for use outside the test environment.
"""

import sys


class _BeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for op in ("nms", "qnms"):
                library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _keep.append(library)  # the schemas live as long as the library object
        return None


_keep: list = []
sys.meta_path.insert(0, _BeforeTorchvision())
