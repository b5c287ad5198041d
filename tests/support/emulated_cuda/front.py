"""What Python asks of a torch built for CUDA, answered by the emulated device."""

import contextlib
import functools

import torch


def replace(device):
    """Puts functions in the place of those that a CPU build lacks; ``device`` is the library."""

    # Python functions: those of ctypes have no hash, which dynamo wants of everything in torch.
    def get_device():
        return device.get_device()

    def get_sync_debug_mode():
        return device.get_sync_mode()

    def exchange_device(index):
        before = device.get_device()
        if index >= 0:
            device.set_device(index)
        return before

    def maybe_exchange_device(index):  # a function of its own: dynamo tells the two apart
        return exchange_device(index)

    def synchronize(where=None):
        index = None if where is None else torch.device(where).index
        device.synchronize(-1 if index is None else index)

    for owner, functions in {
        torch._C: {
            "_cuda_getDevice": get_device,
            "_cuda_setDevice": lambda index: device.set_device(index) and None,
            "_cuda_get_sync_debug_mode": get_sync_debug_mode,
            "_cuda_set_sync_debug_mode": lambda mode: device.set_sync_mode(mode) and None,
        },
        torch.cuda: {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "current_device": get_device,
            "_exchange_device": exchange_device,
            "_maybe_exchange_device": maybe_exchange_device,
            "synchronize": synchronize,
            "is_bf16_supported": lambda *args, **kwargs: True,
            "is_current_stream_capturing": lambda: bool(device.is_capturing()),
            "Stream": Stream,
            "Event": Event,
            "stream": lambda stream: contextlib.nullcontext(),
            "CUDAGraph": functools.partial(CUDAGraph, device),
            "graph": capture,
            "current_stream": lambda device=None: torch.accelerator.current_stream(device),
            "get_device_name": lambda device=None: Properties.name,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: Properties,
            "_get_device_properties": lambda device=None: Properties,
            "memory_allocated": lambda where=None: device.get_live_bytes(),
            "max_memory_allocated": lambda where=None: device.get_peak_bytes(),
            "reset_peak_memory_stats": lambda where=None: device.reset_peak_bytes(),
            "empty_cache": lambda: None,
        },
        torch.cuda.graphs: {"graph_pool_handle": lambda: (0, 0)},
        # For nn.RNN, which lays its weights out for cuDNN.
        torch.backends.cudnn: {"is_acceptable": torch.cudnn_is_acceptable},
        torch.backends.cudnn.rnn: {"get_cudnn_mode": lambda mode: 0},
        torch: {
            "_use_cudnn_rnn_flatten_weight": lambda: True,
            "_cudnn_rnn_flatten_weight": flatten_weights,
        },
    }.items():
        for name, function in functions.items():
            setattr(owner, name, function)
    torch.UntypedStorage.__new__ = new_storage
    torch.cuda._initialized = True
    torch.cuda.default_generators = (torch.default_generator,) * 2


class Stream(torch.Stream):
    """A stream, whose class annotations of scripts name."""

    def __new__(cls, device="cuda", **kwargs):
        return super().__new__(cls, device)


class Event(torch.Event):
    """An event, likewise; the objects are torch's own, which alone have an ``elapsed_time``."""

    def __new__(cls, **kwargs):
        return torch.Event("cuda", **kwargs)


class Properties:
    name, major, minor, gcnArchName = "emulated CUDA", 9, 0, ""
    total_memory, multi_processor_count, warp_size = 1 << 34, 1, 32
    regs_per_multiprocessor, max_threads_per_multi_processor = 65536, 2048


# -- CUDA graphs ----------------------------------------------------------------------------------


class CUDAGraph:
    def __init__(self, device):
        self.device = device
        self.number = None

    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.number = self.device.begin_capture()

    def capture_end(self):
        self.device.end_capture()

    def replay(self):
        self.device.replay(self.number)

    def reset(self):
        self.device.drop_graph(self.number)

    __del__ = reset


@contextlib.contextmanager
def capture(graph, pool=None, stream=None, capture_error_mode="global"):
    torch.cuda.synchronize()
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


# -- what nn.RNN asks -----------------------------------------------------------------------------


def flatten_weights(weights, *_):
    pieces = torch.cat([weight.flatten() for weight in weights]).split([w.numel() for w in weights])
    for weight, piece in zip(weights, pieces, strict=True):
        weight.set_(piece.view_as(weight))


plain_new_storage = torch.UntypedStorage.__new__


def new_storage(cls, *args, **kwargs):
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        count = args[0] if args and isinstance(args[0], int) else 0
        return torch.empty(count, dtype=torch.uint8, device=device).untyped_storage()
    return plain_new_storage(cls, *args, **kwargs)
