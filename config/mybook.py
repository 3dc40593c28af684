# A text of your own, in about five minutes on a laptop without a GPU. The shape of the network and how often
# it sees the text follow from its size, by the table below; flags win, as everywhere.
#
#   data     python prepare.py book.txt          (makes data/book; folders, .epub, ...: docs/data.md)
#   launch   python train.py --dataset=book config/mybook.py
#            all of it, from installing to samples: bash runs/mybook.sh book.txt
#   batch    16 sequences x 128 tokens = 2,048 tokens per iteration
#   cost     about five minutes on two CPU cores
#   loss     depends on text and tokenizer: the report has bits per byte, which compare

from dataset import Dataset as _Dataset

# bytes of text up to which a row holds, layers, channels, dropout, times over the text, iterations at most
_table = (
    (500_000, 2, 128, 0.2, 20, 3500),  # would be learned by heart, were it not blurred by dropout
    (3_000_000, 2, 160, 0.1, 12, 3000),
    (10_000_000, 1, 192, 0.05, 5, 2500),  # the fewer layers, the more text in the same time
    (1e15, 1, 192, 0.0, 1, 3000),
)
_name, _tokens, _bytes = 'book', 10**6, 10**6  # where this file is looked at by itself
if 'dataset' in globals():
    _data = _Dataset(dataset, data_dir)
    _name, _tokens = dataset, _data.train.n
    _bytes = _data.meta['splits'].get('train', {}).get('bytes', _tokens)
_row = [row for row in _table if _bytes <= row[0]][0]
_, n_layer, n_embd, dropout, _times, _most = _row

arch = 'local'
n_head = n_embd // 64
batch_size = 16
block_size = min(128, max(8, _tokens // 64))
gradient_accumulation_steps = 1

matrix_optimizer = 'muon'
momentum = 0.85
matrix_lr = 0.03
embedding_lr = 0.1
learning_rate = 0.01
weight_decay = 0.0
beta1, beta2 = 0.8, 0.95
adam_eps = 1e-10
grad_clip = 0.0

max_iters = max(100, min(_most, _times * _tokens // (batch_size * block_size)))
lr_schedule = 'wsd'
decay_fraction = 0.7
warmup_iters = 0

out_dir = f'out-{_name}'
always_save_checkpoint = False  # ckpt.pt, which sample.py takes, is the one with the best validation loss
eval_interval = sample_interval = max(1, max_iters // 10)
eval_iters = 50
log_interval = max(1, max_iters // 100)

print(f"{_bytes / 1e6:,.2f} MB of text in {_tokens:,} tokens: {n_layer} layer{'s' if n_layer > 1 else ''} "
      f"and a near one of {n_embd} channels, dropout {dropout:g}, at most {_times} times over the text and "
      f"{_most:,} iterations (by the table in config/mybook.py)")
