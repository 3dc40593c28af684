# A character-level GPT on Shakespeare, nanoGPT's configuration: for debugging, and for a first look on a GPU.
#
#   data     python prepare.py shakespeare_char   (1.1 MB, a download; or --input=FILE)
#   launch   python train.py config/train_shakespeare_char.py
#   batch    64 sequences x 256 characters = 16,384 characters per iteration; 5,000 iterations = 82 epochs
#   cost     30 seconds on one H100, 54 with compiling and evaluating; 3 minutes on one A100 (nanoGPT's
#            README)
#   loss     1.4515 for validation at its best there, after 12 seconds (dev/results.md), then it overfits;
#            1.4697 in nanoGPT's README
#
# On a CPU nanoGPT's README makes it smaller: 1.90 over all of val.bin after 2,000 iterations.
#   python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 \
#     --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 \
#     --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
# config/train_shakespeare_char_cpu.py learns more in that time.

out_dir = 'out-shakespeare-char'
dataset = 'shakespeare_char'

batch_size = 64
block_size = 256  # context of up to 256 characters
gradient_accumulation_steps = 1

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2  # a small dataset, seen many times

learning_rate = 1e-3  # baby networks can afford a higher one
max_iters = 5000
min_lr = 1e-4
beta2 = 0.99  # a bit larger, as there are few tokens in an iteration
warmup_iters = 100

eval_interval = 250  # often, because it overfits
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # only when the validation loss improves

wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'
