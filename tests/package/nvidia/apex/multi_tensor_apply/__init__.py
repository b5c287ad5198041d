"""The interface of NVIDIA's ``multi_tensor_applier``."""

import amp_C


class MultiTensorApply:
    available = amp_C.WHOSE == "theirs"

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag, lists, *args):
        return op(self.chunk_size, noop_flag, lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
