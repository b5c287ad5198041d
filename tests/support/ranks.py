"""Processes that run functions of the tests, each time in a process group of their own."""

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import time
import traceback
import warnings
from datetime import timedelta
from unittest import mock

# Far above what a loaded machine takes: only a hang reaches them.
SECONDS_FOR_START = 300
SECONDS_FOR_COLLECTIVES = 150
SECONDS_FOR_ANSWER = 300


class Ranks:
    """Starts the processes at the first call and keeps them: importing torch costs seconds."""

    def __init__(self, world_size=2, backend="gloo"):
        self.world_size = world_size
        self.backend = backend
        self.processes = []
        self.pipes = []
        self.calls = 0

    def run(self, store, fn, *args):
        """Returns what ``fn(rank, *args)`` returned in each process; ``fn`` is a module's own."""
        if not self.processes:
            self.start()
        self.calls += 1  # a file that an earlier call has used would join the two
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((f"{store}{self.calls}", fn, args)))
        answers = [self.answer_of(rank, SECONDS_FOR_ANSWER) for rank in range(self.world_size)]
        errors = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if errors:
            self.stop()  # a failed collective may leave a process in any state
            raise AssertionError("\n".join(errors))
        return [result for _, result in answers]

    def start(self):
        context = forking()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, self.backend, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        for rank in range(self.world_size):
            self.answer_of(rank, SECONDS_FOR_START)

    def answer_of(self, rank, seconds):
        try:
            if self.pipes[rank].poll(seconds):
                return pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            pass
        self.stop()
        raise AssertionError(f"rank {rank} died, or hung for {seconds} s")

    def stop(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.terminate()
            process.join()
        self.processes, self.pipes = [], []


def forking():
    """Returns the context of processes that one forks which has imported torch, and no apex.

    Beside a GPU they are spawned: CUDA does not begin in a process that was forked.
    """
    import torch

    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])
    return context


def in_new_process(fn, *args):
    """Returns what ``fn(*args)`` returned in a process of its own; ``fn`` is a module's own."""
    with forking().Pool(1) as pool:
        return pool.apply_async(fn, args).get(SECONDS_FOR_ANSWER)


def run_alone(store, fn, *args):
    """Returns what ``fn(0, *args)`` returned in this process, in a group of its own."""
    done, result = answer(0, 1, "gloo", str(store), fn, args)
    if not done:
        raise AssertionError(result)
    return [result]


@contextlib.contextmanager
def fake_group(rank, world_size):
    """One rank of a process group whose backend sends nothing."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def serve(rank, world_size, backend, pipe):
    import torch._dynamo  # the first optimizer would import it

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".* is emulated on this CPU")
    warnings.filterwarnings("ignore", module="torch")  # each release has some of its own
    import apex.amp  # noqa: F401 - for the freeze

    gc.collect()
    gc.freeze()  # what importing has made is garbage of no call
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            store, fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # A process that hangs shows where, and ends.
        faulthandler.dump_traceback_later(SECONDS_FOR_ANSWER - 10, exit=True)
        answered = answer(rank, world_size, backend, store, fn, args)
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(answered))


def answer(rank, world_size, backend, store, fn, args):
    import torch

    from tests.support.features import TORCH_VERSION

    torch.manual_seed(0)
    try:
        torch.distributed.init_process_group(
            backend,
            store=torch.distributed.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=SECONDS_FOR_COLLECTIVES),
        )
        # A rank that is through while another still connects would close the connection on it.
        torch.distributed.barrier()
        result = fn(rank, *args)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    except BaseException:  # noqa: BLE001 - the test gets it
        return False, traceback.format_exc()
    else:
        return True, result
    finally:
        gc.collect()  # wrappers that live on hold their group, which must not outlive this call
        if torch.distributed.is_initialized():
            if TORCH_VERSION < (2, 8):
                time.sleep(0.1)  # their groups end with the GIL held, for which threads may wait
            torch.distributed.destroy_process_group()


def run_script(on_ranks, path, *arguments):
    """Runs a script in each process as torchrun would; returns what the first rank printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return on_ranks(_run, str(path), [str(each) for each in arguments], port)[0]


def _run(rank, path, arguments, port):
    import torch

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": torch.distributed.get_world_size()}
    torch.distributed.destroy_process_group()  # the script makes one
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
        mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}),
        mock.patch.object(sys, "argv", [path, *arguments]),
        mock.patch.object(sys, "path", [os.path.dirname(path), *sys.path]),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()
