"""
The first of three scripts that train a GPT; it learns to write model.py.

It leaves the rest, such as checkpoints, to docs/middle_loop.py and train.py.

    $ python docs/minimal_loop.py
"""
import sys
from pathlib import Path

import torch

repo = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(repo))
from model import GPT, GPTConfig

text = (repo / 'model.py').read_bytes()  # the data: a text is a sequence of bytes, and each byte is a token
data = torch.tensor(list(text))
config = GPTConfig(vocab_size=256, block_size=64, n_layer=2, n_head=4, n_embd=128, bias=False)
torch.manual_seed(1337)
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

for step in range(401):
    starts = torch.randint(len(data) - config.block_size, (16,))  # 16 random positions in the text
    chunks = torch.stack([data[s:s + config.block_size + 1] for s in starts])  # (B, T + 1)
    x, y = chunks[:, :-1], chunks[:, 1:]  # the target at each position is the next token
    logits, loss = model(x, y)  # the initial loss is near ln(256) = 5.55: all bytes are equally likely
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # otherwise the next gradient would be added to this one
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

model.eval()
prompt = torch.tensor([list(b'class ')])
print(bytes(model.generate(prompt, 300, temperature=0.5)[0].tolist()).decode('utf-8', 'replace'))
