#!/usr/bin/env bash
# From text to a score of GLUE on two cores without a GPU: two hours. In Cloze's folder, after `make demo`:
#
#     bash docs/examples/laptop.sh
#
# Times were measured on 2 cores of AMD EPYC with AVX512-BF16, on other text. It costs nothing.
# After an interruption start the script again: a step that is done is not repeated, and one that was stopped continues.
set -euo pipefail
. .venv/bin/activate

# Simple English Wikipedia, and one task of GLUE: as long as the network takes.
python data_prep/fetch.py hub wikimedia/wikipedia --config-name 20231101.simple --out data/raw/simple
python finetuning/fetch.py glue --task sst2

# Shards: half a minute. 148 MB of text took 22 s (benchmarks/results/preparation-avx512-bf16-2-cores.json, growth).
python data_prep/shard.py --docs data/raw/simple --out data/laptop --vocab-size 8192 --lengths 32 64 128 --duplicates 1
python data_prep/verify.py data/laptop

# BERT-Mini, 12,400 steps: 92 minutes (docs/training.md, "What two hours give"); --shorten 0.2 takes a fifth of them.
OMP_NUM_THREADS=2 python pretraining/train.py --recipe bert_mini_two_hours --data data/laptop --out runs/laptop
python pretraining/evaluate.py runs/laptop --fill "The river is [MASK] than the mountain."

# SST-2, 4 learning rates x 4 epochs: a quarter of an hour, at the 1,240 sentences a second of
# benchmarks/results/finetuning-avx512-bf16-2-cores.json.
python finetuning/run_glue.py --recipe miniature --model runs/laptop --task sst2
