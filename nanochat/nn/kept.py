"""Remembers tensors that many layers share, such as attention masks, so that each is made once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.compiler import is_compiling


class Kept:
    """The last `most` tensors that were asked for, by key; the one unused for longest is evicted first."""

    def __init__(self, most: int):
        self.most = most
        self._tensors: OrderedDict[Hashable, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tensors)

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of a key, made now if it is not kept.

        While a model is being compiled nothing is kept: the tensor becomes part of the compiled code.
        """
        if is_compiling():
            return make()
        if key not in self._tensors:
            with torch.inference_mode(False):  # a tensor made while sampling must serve training too
                self._tensors[key] = make()
            if len(self._tensors) > self.most:
                self._tensors.popitem(last=False)
        self._tensors.move_to_end(key)
        return self._tensors[key]
