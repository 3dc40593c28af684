# The exercises: a third of the width and half of the context of the quick start, for docs/exercises.md.
#
#   data     python prepare.py --tokenizer=byte --data_dir=data/bytes   (the quick start's text, as bytes)
#   launch   python train.py config/quickstart.py config/exercises.py --seed=1
#   batch    8 sequences x 128 bytes = 1,024 bytes per iteration; 300 iterations = 0.3 million bytes
#   cost     20 s on one CPU core (EPYC in dev/results.md)
#   loss     validation 1.7446, 1.7452 and 1.7242 nats per byte with --seed=1, 2 and 3

import os

out_dir = 'out-exercises'
overwrite = True
data_dir = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'data', 'bytes')

n_layer = 3
n_embd = 64
block_size = 128
max_iters = 300

eval_interval = 300
eval_iters = 25
log_interval = 50
sample_interval = 0

device = 'cpu'
dtype = 'float32'  # with the device: the same losses on all machines, up to rounding
