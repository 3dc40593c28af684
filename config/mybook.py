# A text of your own, in about five minutes on a laptop without a GPU. The shape of the network, and how often
# it sees the text, follow from its size, by the table below, and from the minutes: the pace of this machine
# is measured first, with the flags of the command line.
#
#   data     python prepare.py book.txt          (makes data/book; folders, .epub, ...: docs/data.md)
#   launch   python train.py --dataset=book config/mybook.py
#            and then, where minutes are left, one that learns from it as well: bash runs/mybook.sh book.txt
#   batch    2,048 tokens per iteration: 4 sequences x 512 bytes, 16 x 128 tokens, 8 x 256 from 3 MB on
#   cost     about five minutes; with --max_minutes=20 four fifths of them, the rest is a reserve
#   loss     depends on text and tokenizer: eval.py prints bits per byte, which compare

import glob as _glob
import time as _time

from dataset import Dataset as _Dataset

# bytes of text up to which a row holds, layers, channels, context in tokens of a BPE; against learning it by
# heart: dropout (which takes longer, and gives less where there is more text), token_noise and the decay of
# the embeddings; how often one network is best to see the text: dev/records/own_text.md. The first two rows
# are for bytes: of so little text they are learned by heart less than the tokens of a BPE and their pairs
_table = (
    (150_000, 2, 192, 128, 0.1, 0.05, 0.5, 7),
    (450_000, 2, 192, 128, 0.0, 0.02, 0.1, 6),
    (3_000_000, 2, 160, 128, 0.0, 0.0, 0.3, 5),
    (10_000_000, 1, 192, 256, 0.0, 0.0, 0.1, 2.5),
    (1e15, 1, 192, 256, 0.0, 0.0, 0.0, 2),
)
_name, _tokens, _bytes, _vocab_size = 'book', 10**6, 10**6, 512  # where this file is looked at by itself
if 'dataset' in globals():
    _data = _Dataset(dataset, data_dir)
    _name, _tokens, _vocab_size = dataset, _data.train.n, _data.vocab_size
    _bytes = _data.meta['splits'].get('train', {}).get('bytes', _tokens)
_row = [row for row in _table if _bytes <= row[0]][0]
_, n_layer, n_embd, _context, _dropout, _noise, weight_decay, _times = _row
_taught = bool(globals().get('teacher'))
if _taught:  # what it says is not learned by heart so soon
    _dropout, _noise = 0.0, _noise / 3
if globals().get('out_dir', 'out') == 'out':
    out_dir = f'out-{_name}'
_known = 'dataset' in globals()  # else this file is looked at by itself
_word, _, _source = init_from.partition(':') if _known else ('', '', '')
_here = _known and _glob.glob(f'{_glob.escape(out_dir)}/ckpt*.pt')
_resumed = _word in ('resume', 'auto') and _here or _word == 'resume' and _source
if not _resumed:  # else as it was planned
    dropout, token_noise = _dropout, _noise
_minutes = globals().get('max_minutes') or 6
if _minutes > 15 and _bytes > (3e6 if _taught else 10e6):
    n_layer, n_embd = 2, 256  # there is time for a larger one, and enough to learn

arch = 'local'
norm = 'layernorm'  # has a fast kernel on a CPU
qk_norm = False
softcap = 15.0 if _vocab_size < 1000 else 0.0  # of so many logits it is a quarter of an iteration
bias = False
n_head = max(1, n_embd // 64)
# bytes need a longer context for as many words
block_size = min(512 if _vocab_size < 300 else _context, max(8, _tokens // 64))
batch_size = 2048 // block_size
gradient_accumulation_steps = 1

matrix_optimizer = 'muon'
momentum = 0.85
matrix_lr = 0.03
embedding_lr = 0.1
learning_rate = 0.01
matrix_weight_decay = 0.0
beta1, beta2 = 0.8, 0.95
adam_eps = 1e-10
grad_clip = 0.0

lr_schedule = 'wsd'
decay_fraction = 0.7
warmup_iters = 0


def _measure():
    """(seconds per iteration, whether it is compiled)"""
    import torch

    from configurator import fail
    from model import GPT
    from optim import create_optimizer
    from support import cpu, devices
    from support.compiling import ON_CPU, compile_model
    from support.setup import make_config
    where, _ = devices.choose_device(device)
    words, _ = devices.choose_dtype(dtype, where)
    torch.set_float32_matmul_precision('highest' if words == 'float32' else 'high')  # else compiled once more
    shape = make_config({**globals(), 'vocab_size': _vocab_size})
    if problems := shape.problems():
        fail(*problems)
    model = GPT(shape).to(where)
    cpu.faster(model)
    cpu.watch(where)  # beside other programs threads that spin would be measured instead
    optimizer = create_optimizer(model, learning_rate, weight_decay, (beta1, beta2), adam_eps,
                                 matrix_optimizer, dtype='bfloat16' if words == 'bfloat16' else 'float32')
    ids = torch.randint(_vocab_size, (batch_size, block_size), device=where)

    def step():
        begin = _time.perf_counter()
        with devices.autocast(where, words):
            loss = model(ids, ids, return_logits=False)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for a GPU
        return _time.perf_counter() - begin

    compiled = _compiling and where.type == 'cpu' and compile_model(model, step, 'auto', **ON_CPU) is None
    times, slow = [], 45 if compiled else 5  # after the compiler's company threads sleep a while
    while len(times) < slow + 15 and sum(times) < 3 * _minutes:  # seconds, a twentieth of all
        times.append(step())
    times = sorted(times[-15:])
    return gradient_accumulation_steps * times[len(times) // 2], compiled  # their median


always_save_checkpoint = False  # ckpt.pt, which sample.py takes, is the one with the best validation loss
eval_iters = 20
_best = max(100, _times * _tokens // max(1, batch_size * block_size * gradient_accumulation_steps))
_asked = _known and 'max_iters' in _flags  # those of the command line
# half a minute on a CPU, and then an iteration takes three quarters of its time
_compiling = (_known and 'compile' not in _flags and compile == 'auto' and _bytes > 3e6
              and _minutes > (2 if _taught else 4))  # what is taught finds it in the compiler's cache
if _known and (_compiling or not (_resumed or _asked)):
    _begin = _time.perf_counter()
    _pace, _compiled = _measure()
    if _compiled:
        compile = True
    _spent = _time.perf_counter() - _begin
if _known and not _resumed:  # else as it was planned
    _why = 'as asked'
    if not _asked:
        _why = 'more would not pay'
        if _taught:  # its forward pass and a loss over all words cost a share of a step; more pay
            _share = 0.7 if _vocab_size > 1000 else 0.5
            _best, _pace = 1.5 * _best, _pace * (1 + _share * len(teacher.split(',')))
        _fit = (60 * 0.8 * _minutes - _spent) / _pace
        if not _taught and _fit > 1.2 * _best:  # leaves most of the time to one that it teaches
            _best = min(_best, _fit / 3.5)
            _why = 'the rest of the minutes is better spent on one that it teaches'
        if _fit < _best:
            _why = f'as many as the minutes allow, at {_pace:.3f} s each'
        max_iters = max(1, int(min(_best, _fit)))
    eval_interval, sample_interval = -(-max_iters // 5), -(-max_iters // 3)
    log_interval = max(1, max_iters // 50)
    print(f"{_bytes / 1e6:,.2f} MB of text in {_tokens:,} tokens: {n_layer} layer{'s' * (n_layer > 1)} "
          f"and a near one of {n_embd} channels, dropout {dropout:g}, noise {token_noise:.2g}, {max_iters:,} "
          f"iterations ({_why}); by the table in config/mybook.py")
