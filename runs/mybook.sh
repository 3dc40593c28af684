#!/usr/bin/env bash
# From a text of yours to a model that writes like it, on any machine: installs
# into .venv, makes a dataset with a tokenizer that fits its size, trains for
# five minutes (config/mybook.py), and samples. Nearly half of the time is for
# teachers, up to four, as many at once as there are cores; then a network of
# the same shape learns from the text and from the mean of what they predict. It
# is better than each of them, and than one that learns alone for as long.
#   bash runs/mybook.sh book.txt      .txt, .md, .html, .epub, ..., also .gz; in
#                                     any encoding
#   bash runs/mybook.sh book.txt more.epub folder
#                                     together one dataset, named as the first
#   bash runs/mybook.sh book.txt --tokenizer=char --n_layer=4
#                                     flags of prepare.py and of train.py
#   bash runs/mybook.sh book.txt --minutes=20
#                                     of training; whole minutes
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
inputs=() prepare=() train=() data_dir=() name='' out_dir='' init=--init_from=auto minutes=5 teacher=''
for word in "$@"; do
  case $word in
    '') ;;
    --tokenizer=* | --text_key=* | --encoding=* | --encoding_errors=* | --val_fraction=* | --max_tokens=* | \
      --shard_tokens=* | --workers=*) prepare+=("$word") ;;
    --data_dir=*) data_dir=("--data_dir=$(absolute "${word#*=}")") ;;
    --out_dir=*) out_dir=$(absolute "${word#*=}") ;;
    --name=*) name=${word#*=} ;;
    --minutes=*) minutes=${word#*=} ;;
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
python -c 'import numpy, tiktoken, tokenizers, torch' 2> /dev/null ||
  python -m pip install --quiet --disable-pip-version-check -r requirements.txt tokenizers==0.23.3

# bash 3 of macOS takes an empty array for an unset variable, hence ${x[@]+...}
python prepare.py "$name" "${inputs[@]}" --encoding=auto ${prepare[@]+"${prepare[@]}"} \
  ${data_dir[@]+"${data_dir[@]}"}
mkdir -p "$out_dir/teachers"
if [[ $init == *overwrite ]]; then rm -rf "$out_dir"/teachers/* "$out_dir"/ckpt*.pt; fi

left() {  # of so many seconds since the beginning, in minutes, and a fifth as a reserve
  local seconds=$((($1 - SECONDS + begin) * 6 / 5))
  ((seconds > 0)) || seconds=0
  printf '%d.%02d' $((seconds / 60)) $((seconds % 60 * 5 / 3))
}
train() {  # seconds since the beginning, flags
  python train.py --dataset="$name" ${data_dir[@]+"${data_dir[@]}"} config/mybook.py \
    --max_minutes="$(left "$1")" "${@:2}" ${train[@]+"${train[@]}"}
}
teachers() {  # number i, i + slots, ... up to four, as long as another one fits into the seconds
  local i=$1 end=$2 took=0 started
  if [ "$slots" != 1 ]; then local -x OMP_NUM_THREADS=1; fi  # a thread each
  while ((i <= 4 && (took == 0 || SECONDS - begin + took * 4 / 5 < end))); do
    started=$SECONDS
    train "$end" --seed="$i" --out_dir="$out_dir/teachers/$i" --init_from=auto ||
      [ $? = $time_is_up ] || return
    took=$((SECONDS - started + 1)) i=$((i + slots))
  done
}

begin=$SECONDS status=0 time_is_up=143
if [ ! -e "$out_dir/ckpt.pt" ] && ((minutes > 2)); then  # else there is no time for more than one
  # on a GPU one after the other
  slots=$(python -c 'import os, torch
print(1 if torch.accelerator.is_available() else min(4, os.cpu_count()))')
  pids=()
  for ((k = 2; k <= ${slots:=1}; k++)); do
    teachers "$k" $((27 * minutes)) > "$out_dir/teachers_$k.log" 2>&1 &
    pids+=($!)
  done
  teachers 1 $((27 * minutes)) || status=$?
  for pid in ${pids[@]+"${pids[@]}"}; do wait "$pid" || status=$?; done
fi
teachers=$(ls "$out_dir/teachers" | wc -l | tr -d ' ')
if [ "$status" = 0 ]; then
  if ((teachers)); then teacher="--teacher=$out_dir/teachers"; fi
  end=$((60 * minutes)) least=$((SECONDS - begin + 24 * minutes))  # where teachers took more than their time
  train $((end > least ? end : least)) ${teacher:+"$teacher"} --out_dir="$out_dir" \
    $init || status=$?
  if [ "$status" = $time_is_up ]; then status=0; fi
fi
if [ "$status" != 0 ]; then
  echo "to continue, and then sample: (cd $(printf %q "$here") && $again)"
  exit "$status"
fi
echo "done: $teachers teachers and the network, $((SECONDS - begin)) seconds of training"
python eval.py --out_dir="$out_dir" ${data_dir[@]+"${data_dir[@]}"} --sample_tokens=0
python sample.py --out_dir="$out_dir" --num_samples=3 --max_new_tokens=300
echo "what happened, and what it wrote on the way: $out_dir/report.md"
if [ "$here" != "$PWD" ]; then echo "the commands above run in $PWD"; fi
