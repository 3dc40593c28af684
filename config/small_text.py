# A text of your own, 0.1 to 10 MB, on a laptop or a GPU.
#
#   data     python prepare.py book.txt   (makes data/book; below 1 MB, by characters). A longer text needs a
#            small vocabulary: pip install tokenizers, then --tokenizer=bpe:2048. With GPT-2's 50,257 ids, the
#            embedding would be most of this network
#   launch   python train.py config/small_text.py --dataset=book --out_dir=out-book
#   sample   python sample.py --out_dir=out-book
#   batch    8 sequences x 256 tokens = 2,048 tokens per iteration
#   budget   600 iterations, at most eight epochs: 116 s of training on two CPU cores with bfloat16. For a
#            better model: --max_iters=5000. The checkpoint with the lowest validation loss is kept, as it may
#            overfit
#   loss     validation 1.3158 (three seeds, standard deviation 0.0025) nats per character for a book of 0.30 MB: docs/reading_logs.md, "a book".
#            eval.py prints bits per byte, which can be compared between tokenizers
#
# If it overfits (the training loss falls, the validation loss rises): more --dropout, fewer --max_epochs.
# Over eight epochs of a book, dropout 0.1 helped by 0.14 nats, --matrix_weight_decay=0.5 harmed (dev/LOG.md).
# If it does not, and there is time: --n_layer=4 --n_embd=384, more --max_epochs.

out_dir = 'out-book'
dataset = 'book'

arch = 'modern'
n_layer = 3
n_head = 4
n_embd = 192
dropout = 0.1
batch_size = 8
block_size = 256
gradient_accumulation_steps = 1

# as in config/quickstart.py, tuned by hand for small batches, with weight decay of the embeddings
matrix_optimizer = 'muon'
matrix_lr = 0.03
momentum = 0.85
embedding_lr = 0.1
learning_rate = 0.01
weight_decay = 0.1  # of embedding and head
matrix_weight_decay = 0.0
beta1 = 0.8
beta2 = 0.95
adam_eps = 1e-10
grad_clip = 0.0

max_epochs = 8
max_iters = 600
lr_schedule = 'wsd'
decay_fraction = 0.7
warmup_iters = 0

eval_interval = 100
eval_iters = 50
log_interval = 20
sample_interval = 200
always_save_checkpoint = False  # only when the validation loss improves
