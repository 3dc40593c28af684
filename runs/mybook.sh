#!/usr/bin/env bash
# From a text of yours to a model that writes like it, on any machine: installs
# into .venv, makes a dataset with a tokenizer that fits its size, trains about
# five minutes on a laptop (config/mybook.py), and samples.
#   bash runs/mybook.sh book.txt      .txt, .md, .html, .epub, ..., also .gz; in
#                                     any encoding
#   bash runs/mybook.sh book.txt more.epub folder
#                                     together one dataset, named as the first
#   bash runs/mybook.sh book.txt --tokenizer=char --n_layer=4
#                                     flags of prepare.py and of train.py
#   bash runs/mybook.sh book.txt --name=NAME
#                                     the dataset data/NAME, the run out-NAME
# Run again, it continues; --overwrite starts over.
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
inputs=() prepare=() train=() data_dir=() name='' out_dir='' init=--init_from=auto
for word in "$@"; do
  case $word in
    '') ;;
    --tokenizer=* | --text_key=* | --encoding=* | --encoding_errors=* | --val_fraction=* | --max_tokens=* | \
      --shard_tokens=* | --workers=*) prepare+=("$word") ;;
    --data_dir=*) data_dir=("--data_dir=$(absolute "${word#*=}")") ;;
    --out_dir=*) out_dir=$(absolute "${word#*=}") ;;
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
python train.py --dataset="$name" ${data_dir[@]+"${data_dir[@]}"} config/mybook.py --out_dir="$out_dir" \
  "$init" ${train[@]+"${train[@]}"} || {
  status=$?
  echo "to continue, and then sample: (cd $(printf %q "$here") && $again)"
  exit $status
}
python sample.py --out_dir="$out_dir" --num_samples=3 --max_new_tokens=300
echo "what happened, and what it wrote on the way: $out_dir/report.md"
if [ "$here" != "$PWD" ]; then echo "the commands above run in $PWD"; fi
