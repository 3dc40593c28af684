#!/usr/bin/env bash
# From a text of yours to a model that writes like it, on any machine: installs
# into .venv, makes a dataset with a tokenizer that fits its size, trains for
# five minutes (config/mybook.py) as many networks as there are cores, at most
# four at once, and samples from the mean of their probabilities. Where a text
# is short, they are better together than one that is trained for longer.
#   bash runs/mybook.sh book.txt      .txt, .md, .html, .epub, ..., also .gz; in
#                                     any encoding
#   bash runs/mybook.sh book.txt more.epub folder
#                                     together one dataset, named as the first
#   bash runs/mybook.sh book.txt --tokenizer=char --n_layer=4
#                                     flags of prepare.py and of train.py
#   bash runs/mybook.sh book.txt --minutes=20
#                                     of training: larger or more networks
#   bash runs/mybook.sh book.txt --name=NAME
#                                     the dataset data/NAME, the runs out-NAME/1,
#                                     out-NAME/2, ...
# Run again, it continues, and then trains further networks; --overwrite starts
# over.
# PYTHON=/path/to/python chooses another Python.
set -euo pipefail
here=$PWD
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
  sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
  exit
fi
again=$(printf '%q ' bash "$0" "$@")
cd "$(dirname "$0")/.."

absolute() { if [[ $1 == /* || $here == "$PWD" ]]; then echo "$1"; else echo "$here/$1"; fi; }
inputs=() prepare=() train=() data_dir=() name='' out_dir='' minutes=5
for word in "$@"; do
  case $word in
    '') ;;
    --tokenizer=* | --text_key=* | --encoding=* | --encoding_errors=* | --val_fraction=* | --max_tokens=* | \
      --shard_tokens=* | --workers=*) prepare+=("$word") ;;
    --data_dir=*) data_dir=("--data_dir=$(absolute "${word#*=}")") ;;
    --out_dir=*) out_dir=$(absolute "${word#*=}") ;;
    --name=*) name=${word#*=} ;;
    --minutes=*) minutes=${word#*=} ;;
    --overwrite | --overwrite=True) prepare+=(--overwrite); overwrite=yes ;;
    -*) train+=("$word") ;;
    /* | hf:*) inputs+=("--input=$word") ;;
    *) inputs+=("--input=$here/$word") ;;
  esac
done
if [ ${#inputs[@]} = 0 ]; then
  echo "error: no text is named. bash runs/mybook.sh book.txt" >&2
  exit 2
fi
if [ -z "$name" ]; then  # book for texts/book.txt
  name=$(basename "${inputs[0]#--input=}")
  for ending in gz zst txt md html htm xhtml epub jsonl parquet npy; do name=${name%."$ending"}; done
  while [[ $name == [.-]* ]]; do name=${name#?}; done
fi
out_dir=${out_dir:-$(if [ "$here" != "$PWD" ]; then echo "$PWD/"; fi)out-$name}

source runs/venv.sh
python -c 'import numpy, tiktoken, tokenizers, torch' 2> /dev/null ||
  python -m pip install --quiet --disable-pip-version-check -r requirements.txt tokenizers==0.23.3

# bash 3 of macOS takes an empty array for an unset variable, hence ${x[@]+...}
python prepare.py "$name" "${inputs[@]}" --encoding=auto ${prepare[@]+"${prepare[@]}"} \
  ${data_dir[@]+"${data_dir[@]}"}
if [ -n "${overwrite:-}" ]; then rm -rf "$out_dir"/[0-9]*; fi
mkdir -p "$out_dir"

# on a GPU one after the other; else one thread for each of several at once
slots=$(python -c 'import os, torch
print(1 if torch.accelerator.is_available() else min(4, os.cpu_count()))')
if [ "${slots:=1}" != 1 ]; then export OMP_NUM_THREADS=1; fi

slot() {  # the networks i, i + slots, ..., as long as another one fits into the minutes
  local i=$1 took=0 started left=$((60 * minutes))
  while ((left >= took * 4 / 5)); do
    started=$SECONDS
    python train.py --dataset="$name" ${data_dir[@]+"${data_dir[@]}"} config/mybook.py --seed="$i" \
      --out_dir="$out_dir/$i" --max_minutes="$(printf '%d.%02d' $((left / 60)) $((left % 60 * 5 / 3)))" \
      --init_from=auto ${train[@]+"${train[@]}"} || return
    took=$((SECONDS - started + 1)) left=$((60 * minutes - SECONDS + begin)) i=$((i + slots))
  done
}
begin=$SECONDS
pids=()
for ((k = 2; k <= slots; k++)); do
  slot "$k" > "$out_dir/$k.log" 2>&1 & pids+=($!)
done
status=0
slot 1 || status=$?
for pid in ${pids[@]+"${pids[@]}"}; do wait "$pid" || status=$?; done
if [ "$status" != 0 ]; then
  echo "to continue, and then sample: (cd $(printf %q "$here") && $again)"
  exit "$status"
fi
echo "done: $(ls -d "$out_dir"/*/ckpt.pt | wc -l | tr -d ' ') networks in $((SECONDS - begin)) seconds"
python eval.py --out_dir="$out_dir" ${data_dir[@]+"${data_dir[@]}"} --sample_tokens=0
python sample.py --out_dir="$out_dir" --num_samples=3 --max_new_tokens=300
echo "what happened, and what the first of them wrote on the way: $out_dir/1/report.md"
if [ "$here" != "$PWD" ]; then echo "the commands above run in $PWD"; fi
