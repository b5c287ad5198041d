#!/bin/sh
# Two processes on this machine: nccl with two GPUs, gloo on a CPU.
cd "$(dirname "$0")" || exit
exec torchrun --standalone --nproc_per_node=2 distributed_data_parallel.py "$@"
