# A character-level GPT on Shakespeare, nanoGPT's configuration: for debugging and a first run on a GPU.
#
#   data     python prepare.py shakespeare_char   (1.1 MB, a download; or --input=FILE)
#   launch   python train.py config/train_shakespeare_char.py
#   batch    64 sequences x 256 characters = 16,384 characters per iteration; 5,000 iterations = 82 epochs
#   cost     30 seconds of training on one H100, 54 in all (dev/results.md); 3 minutes on one A100 (nanoGPT's
#            README)
#   loss     validation 1.4515 at its best on an H100, then it overfits; 1.4697 in nanoGPT's README.
#            docs/reading_logs.md, "Shakespeare on a GPU"
#
# The smaller model for a CPU in nanoGPT's README, 1.90 over all of val.bin after 2,000 iterations:
#   python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 \
#     --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 \
#     --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
# config/train_shakespeare_char_cpu.py learns more in the same time.

out_dir = 'out-shakespeare-char'
dataset = 'shakespeare_char'

batch_size = 64
block_size = 256  # characters of context
gradient_accumulation_steps = 1

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2  # a small dataset: 82 epochs

learning_rate = 1e-3  # small networks can use a higher one
max_iters = 5000
min_lr = 1e-4
beta2 = 0.99  # a little higher, as there are few tokens per iteration
warmup_iters = 100

eval_interval = 250  # often, because it overfits
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # only when the validation loss improves

wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'
