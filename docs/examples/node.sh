#!/usr/bin/env bash
# From text to GLUE with BERT-Base on one node of 8 GPUs. In Cloze's folder, after `make demo`:
#
#     bash docs/examples/node.sh
#
# Training takes 4 h 48 min on 8 H100, or 77 dollars at 2 dollars a GPU-hour. That is a plan, with --gpu for other GPUs:
#
#     python benchmarks/planner.py --recipe bert_base_lamb --price-per-gpu-hour 2
#
# After an interruption start the script again: a step that is done is not repeated, and one that was stopped continues.
set -euo pipefail
. .venv/bin/activate

# The dump of English Wikipedia and the tasks of GLUE: as long as the network takes.
python data_prep/fetch.py wikipedia --out wiki
python finetuning/fetch.py glue

# Shards of 128 and 512 pieces, masked 5 times. --check says how long it takes here: a core reads 7 MB/s of plain text
# (benchmarks/results/preparation-avx512-bf16-2-cores.json), and a dump has to be unpacked and parsed besides.
python data_prep/shard.py --docs wiki/ --out data/wiki --check
python data_prep/shard.py --docs wiki/ --out data/wiki
python data_prep/verify.py data/wiki

# BERT-Base, both phases, 8,601 steps: 4 h 48 min planned, 4 to 9 hours as other software needs (docs/planning.md).
python pretraining/train.py --check --recipe bert_base_lamb --data data/wiki --ranks 8 --gpu h100-80
torchrun --nproc-per-node 8 pretraining/train.py --recipe bert_base_lamb --data data/wiki --out runs/base

# All tasks of GLUE, 4 learning rates each, a run on each GPU. Nobody has measured how long that takes on GPUs.
python finetuning/run_glue.py --recipe glue --model runs/base
