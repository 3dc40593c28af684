#!/usr/bin/env bash
# From a text of yours to a model that writes like it, on any machine: installs
# into .venv, makes a dataset with a tokenizer that fits its size, trains for
# five minutes (config/mybook.py), and samples. Where more minutes would not pay
# for a network, as it learns its text by heart, another one
# learns from the text and from what those before predict, which is mostly
# better than either; in longer runs up to three such. The best is sampled.
#   bash runs/mybook.sh book.txt      .txt, .md, .html, .epub, ..., also .gz
#   bash runs/mybook.sh book.txt more.epub folder
#                                     together one dataset, named as the first
#   bash runs/mybook.sh book.txt --tokenizer=char --n_layer=4
#                                     flags of prepare.py and of train.py
#   bash runs/mybook.sh book.txt --minutes=20
#                                     of training; whole minutes
#   bash runs/mybook.sh book.txt --name=NAME
#                                     the dataset data/NAME, the run out-NAME
# Run again, it continues: a run that is done teaches one more network, if
# --minutes are a fifth more than it took; --overwrite starts over.
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
inputs=() prepare=() train=() teach=() data=data data_dir=()
name='' out_dir='' init=--init_from=auto minutes=5 seed=1337
for word in "$@"; do
  case $word in
    '') ;;
    --tokenizer=* | --text_key=* | --encoding=* | --encoding_errors=* | --val_fraction=* | --max_tokens=* | \
      --shard_tokens=* | --workers=*) prepare+=("$word") ;;
    --data_dir=*) data=$(absolute "${word#*=}") data_dir=("--data_dir=$data") ;;
    --out_dir=*) out_dir=$(absolute "${word#*=}") ;;
    --name=*) name=${word#*=} ;;
    --minutes=*)
      minutes=${word#*=}
      if [[ ! $minutes =~ ^[1-9][0-9]*$ ]]; then
        echo "error: minutes takes a whole number above 0 ($word)" >&2
        exit 2
      fi
      ;;
    --minutes | --name | --seed | --tokenizer | --out_dir | --data_dir)
      echo "error: no value ($word). write it as $word=VALUE" >&2
      exit 2
      ;;
    --seed=*) seed=${word#*=} ;;
    --overwrite | --overwrite=True) prepare+=(--overwrite); init='--init_from=scratch --overwrite' ;;
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
python -c 'import numpy, tiktoken, tokenizers, torch' 2> /dev/null || {
  for input in "${inputs[@]#--input=}"; do  # before minutes are spent
    if [[ $input != hf:* && $input != *[*?[]* && ! -e $input ]]; then
      echo "error: no such file or folder ($input)" >&2
      exit 2
    fi
  done
  echo "installing torch and what else is needed into .venv, once, which may take minutes"
  python -m pip install --quiet --disable-pip-version-check -r requirements.txt tokenizers==0.23.3
}

# bash 3 of macOS takes an empty array for an unset variable, hence ${x[@]+...}
python prepare.py "$name" "${inputs[@]}" ${prepare[@]+"${prepare[@]}"} \
  ${data_dir[@]+"${data_dir[@]}"}
mkdir -p "$out_dir/teachers"
if [[ $init == *overwrite ]]; then rm -rf "$out_dir"/teachers/* "$out_dir"/ckpt*.pt; fi

# of what counts of up to 6 bytes need, a network needed 0.80 to 0.85 on twelve texts of 0.1 to 20 MB, English
# books (dev/records/own_text.md)
expected=$(python -c "
import sys
from dataset import Dataset
from support.evaluate import ngram_bits_per_byte
data = Dataset(sys.argv[1], sys.argv[2])
if data.val:
    parts = [(part, min(part.n, 5_000_000)) for part in (data.train, data.val)]
    ids = [part.windows([part.n - n], n)[0] for part, n in parts]
    text = [data.tokenizer().decode(part[part != data.meta['end_of_text']].tolist()).encode() for part in ids]
    print(f'{0.84 * ngram_bits_per_byte(text[1], text[0]):.2f}')" "$name" "$data")
if [ -n "$expected" ]; then
  echo "expected  about $expected bits per byte of the validation text, 0.84 of what counts of up to 6" \
    "bytes need, mostly within 0.1, after five minutes of two cores with bfloat16, or twenty without"
fi

left() {  # of all the minutes, and a fifth as a reserve
  local seconds=$(((60 * minutes - SECONDS + begin) * 6 / 5))
  ((seconds > 0)) || seconds=0
  printf '%d.%02d' $((seconds / 60)) $((seconds % 60 * 5 / 3))
}

begin=$SECONDS status=0 time_is_up=143 ended='all training is done' taught=''
while true; do
  teachers=$(ls "$out_dir/teachers" | wc -l | tr -d ' ')
  if ((teachers)); then teach=("--teacher=$(printf '%s\n' "$out_dir"/teachers/* | paste -sd, -)"); fi
  python train.py --dataset="$name" ${data_dir[@]+"${data_dir[@]}"} config/mybook.py --max_minutes="$(left)" \
    --out_dir="$out_dir" --seed=$((seed + teachers)) $init ${teach[@]+"${teach[@]}"} \
    ${train[@]+"${train[@]}"} || status=$?
  if [ $status = $time_is_up ]; then break; fi
  if [ $status != 0 ]; then
    if ls "$out_dir"/ckpt*.pt > /dev/null 2>&1; then
      how="to continue, or with --overwrite before the last bracket to start over, and then sample:"
      if [ $status = 2 ]; then how="if the text has changed, start over:" again+="--overwrite"; fi
      echo "$how (cd $(printf %q "$here") && $again)"
    fi
    exit $status
  fi
  # one that is taught needs more time than all of this run took, also before it was interrupted: a step is
  # longer, and more steps pay
  took=$(python -c "
import sys
from support.report import read_log
print(int(read_log(sys.argv[1])['seconds'][-1]))" "$out_dir")
  if ((teachers == 3)); then break; fi
  rest=$((60 * minutes - SECONDS + begin))
  if ((rest < took * 6 / 5)); then
    ended="all training is done, as what is left is too short for one more, which this one would teach"
    break
  fi
  mkdir "$out_dir/teachers/$((teachers + 1))"
  mv "$out_dir"/*.* "$out_dir/teachers/$((teachers + 1))"
  echo "that network is in $out_dir/teachers/$((teachers + 1)) now, and the next one learns from it as well"
  init=--init_from=auto
done
if [ $status = $time_is_up ]; then
  ended="time was up before it was done, run it again to continue (below: as of its best evaluation so far)"
fi
if ((teachers)); then taught=", taught by $teachers before it"; fi
echo "$ended: the network in $out_dir$taught, $((SECONDS - begin)) of $((60 * minutes)) seconds"
best=$(python -c "
import os, sys
from support.report import read_log, values
trained = [folder for folder in sys.argv[1:] if os.path.isfile(os.path.join(folder, 'log.csv'))]
loss_of = {folder: min(values(read_log(folder), 'val_loss'), default=9e9) for folder in trained}
print(min(loss_of, key=loss_of.get, default=sys.argv[1]))" \
  "$out_dir" "$out_dir"/teachers/*)
if [ "$best" != "$out_dir" ]; then
  echo "better than that, by the loss of the validation text, is one before it: the network in $best"
fi
if [ -n "$expected" ]; then  # else there is no validation text
  python eval.py --out_dir="$best" ${data_dir[@]+"${data_dir[@]}"} --sample_tokens=0
  python -c "
import json, sys
with open(sys.argv[1]) as f:
    texts, expected = json.load(f)['texts'], float(sys.argv[3])
if sys.argv[2] + '/val' in texts:  # else the best was trained on a text of before
    found = texts[sys.argv[2] + '/val']['bpb']
    which = f\"{abs(found - expected):.2f} {'better' if found < expected else 'worse'}\"
    print(f'expected  about {expected:.2f} bits per byte, reached {found:.2f}: {which}')
" "$best/eval.json" "$name" "$expected"
fi
# one book begins but once, too seldom to learn it; a vocabulary of characters may lack the new line
python sample.py --out_dir="$best" --start=$'\n' --num_samples=3 --max_new_tokens=300 ||
  python sample.py --out_dir="$best" --num_samples=3 --max_new_tokens=300
echo "what happened, and what it wrote on the way: $best/report.md"
echo "to have it write more: source .venv/bin/activate, then python sample.py" \
  "--out_dir=$(printf %q "$best") --start=\$'\n'"
if [ "$here" != "$PWD" ]; then echo "the commands above run in $PWD"; fi
