#!/usr/bin/env bash
# From a folder of text to answers to a question. In Cloze's folder, after `make demo`:
#
#     bash docs/examples/search.sh TEXT "a question" [MODEL]
#
# Without a MODEL, a mini is pre-trained on the text first: two hours on two cores (docs/training.md). The rest takes
# minutes for some MB of text (docs/search.md). After an interruption start the script again: it goes on.
set -euo pipefail
. .venv/bin/activate
text=$1 question=$2 model=${3:-runs/search}

if (($# < 3)); then
  python data_prep/shard.py --docs "$text" --out data/search --vocab-size 8192 --lengths 32 64 128 --duplicates 1
  python pretraining/train.py --recipe bert_mini_two_hours --data data/search --out runs/search
fi
python data_prep/pairs.py --docs "$text" --out data/pairs
python finetuning/run_task.py data/pairs/pairs.toml --model "$model" --learning_rate 5e-4 --out runs/searching
echo "$question" >runs/searching/question.txt
python finetuning/predict.py runs/searching/pairs/model data/pairs/passages.jsonl \
  --vectors runs/searching/passages.npy --nearest runs/searching/question.txt
