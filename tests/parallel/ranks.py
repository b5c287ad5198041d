"""Two processes that run functions of the tests, each time in a process group of their own."""

import multiprocessing
import pickle
import traceback
import warnings
from datetime import timedelta

WORLD_SIZE = 2
# Far above what a loaded machine takes: only a hang reaches them.
SECONDS_FOR_START = 300
SECONDS_FOR_COLLECTIVES = 60
SECONDS_FOR_ANSWER = 150


class Ranks:
    """Starts the processes at the first call and keeps them: importing torch costs seconds."""

    def __init__(self):
        self.processes = []
        self.pipes = []

    def run(self, store, fn, *args):
        """Returns what ``fn(rank, *args)`` returned in each process; ``fn`` is a module's own."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((str(store), fn, args)))
        answers = [self.answer_of(rank, SECONDS_FOR_ANSWER) for rank in range(WORLD_SIZE)]
        errors = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if errors:
            self.stop()  # a failed collective may leave a process in any state
            raise AssertionError("\n".join(errors))
        return [result for _, result in answers]

    def start(self):
        context = multiprocessing.get_context("spawn")
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        for rank in range(WORLD_SIZE):
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


def serve(rank, pipe):
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "fp16 is emulated on this CPU")
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            store, fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(answer(rank, store, fn, args)))


def answer(rank, store, fn, args):
    import torch

    torch.manual_seed(0)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(store, WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=SECONDS_FOR_COLLECTIVES),
    )
    try:
        return True, fn(rank, *args)
    except BaseException:  # noqa: BLE001 - the test gets it
        return False, traceback.format_exc()
    finally:
        torch.distributed.destroy_process_group()
