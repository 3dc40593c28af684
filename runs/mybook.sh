#!/usr/bin/env bash
# From a text of yours to a model that writes like it, on any machine: installs into .venv, makes a dataset
# with a tokenizer that fits its size, trains about five minutes on a laptop (config/mybook.py), and samples.
#   bash runs/mybook.sh book.txt                      .txt, .md, .html, .epub, ..., also .gz; in any encoding
#   bash runs/mybook.sh book.txt more.epub folder     together one dataset, with the name of the first
#   bash runs/mybook.sh book.txt --tokenizer=char --n_layer=4        flags of prepare.py and of train.py
# Run again, it continues; --overwrite starts over. PYTHON=/path/to/python chooses another Python.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

inputs=() prepare=() train=() data_dir=() name='' out_dir='' init=--init_from=auto
for word in "$@"; do
  case $word in
    --tokenizer=* | --text_key=* | --encoding=* | --encoding_errors=* | --val_fraction=* | --max_tokens=* | \
      --shard_tokens=* | --workers=*) prepare+=("$word") ;;
    --data_dir=*) data_dir=("$word") ;;
    --out_dir=*) out_dir=${word#*=} ;;
    --name=*) name=${word#*=} ;;
    --overwrite | --overwrite=True) prepare+=(--overwrite); train+=(--overwrite); init=--init_from=scratch ;;
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
  name=$(printf '%s' "${name%%.*}" | LC_ALL=C tr -c 'A-Za-z0-9_-' '_')
fi
out_dir=${out_dir:-out-$name}

source runs/venv.sh
python -c 'import numpy, tiktoken, tokenizers, torch' 2> /dev/null ||
  python -m pip install --quiet --disable-pip-version-check -r requirements.txt tokenizers==0.23.3

# bash 3 of macOS takes an empty array for an unset variable, hence ${x[@]+...}
python prepare.py "$name" "${inputs[@]}" --encoding=auto ${prepare[@]+"${prepare[@]}"} \
  ${data_dir[@]+"${data_dir[@]}"}
python train.py --dataset="$name" ${data_dir[@]+"${data_dir[@]}"} config/mybook.py --out_dir="$out_dir" \
  "$init" ${train[@]+"${train[@]}"}
python sample.py --out_dir="$out_dir" --num_samples=3 --max_new_tokens=300
echo "what happened, and what it wrote on the way: $out_dir/report.md"
