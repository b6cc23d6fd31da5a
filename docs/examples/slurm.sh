#!/usr/bin/env bash
# From text to GLUE with BERT-Large on Slurm. In Cloze's folder on a login node, after `make cluster`:
#
#     cp cluster/site.example.env cluster/site.env     # say in it: account, partition, GPUs of a node
#     bash docs/examples/slurm.sh --dry-run            # prints the jobs
#     bash docs/examples/slurm.sh
#
# Training takes 7 h 30 min on 2 nodes of 8 H100, or 240 dollars at 2 dollars a GPU-hour. That is a plan:
#
#     python benchmarks/planner.py --recipe bert_large_lamb --nodes 2 --network ndr400x8 --price-per-gpu-hour 2
#
set -euo pipefail
. .venv/bin/activate

# The dump of English Wikipedia and the tasks of GLUE, on the login node: as long as the network takes.
python data_prep/fetch.py wikipedia --out wiki
python finetuning/fetch.py glue

# Four jobs, each after the one before. Time limits, preemption and lost nodes send a job back into the queue, where it
# continues (docs/cluster.md). Words after this script go to submit.py, such as --script pretrain_base.
#   prepare     shards of 128 and 512 pieces, masked 5 times, on all processors of a node: not measured
#   pretrain    both phases, 8,601 steps: 7 h 30 min planned, 6 to 14 hours as other software needs (docs/planning.md)
#   finetune    9 tasks x 5 seeds, a GPU each: not measured
#   gather      the best seed of each task, and the table
python cluster/submit.py pipeline --text wiki/ "$@"
