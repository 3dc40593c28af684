"""README.md of a Hugging Face folder: what the model is, from what it was made, how good it is, how to load
it."""

import os

from support.console import format_duration
from support.files import read_json
from support.hf_names import CLASSES, preset_of
from support.report import eval_results

TOKENIZERS = {'char': 'characters', 'byte': 'bytes (UTF-8)'}


def model_card(name, state, config, tokenizer_state, dtype):
    """The text; `state` is a checkpoint that was read (support/load.py), whose folder may have a run.json and
    an eval.json."""
    folder = os.path.dirname(state['path']) if os.path.isfile(state['path']) else None
    run = eval_json = {}
    if folder is not None:
        run = read_json(os.path.join(folder, 'run.json'))
        eval_json = read_json(os.path.join(folder, 'eval.json'))
    return '\n'.join([*head(name), *facts(state, config, tokenizer_state, dtype), *data(run, state),
                      *training(run, state), *evaluation(eval_json, state), *loading(name)]) + '\n'


def n_parameters(weights, config):
    """The number of parameters in {name: tensor}, a tied head not counted twice."""
    return sum(p.numel() for key, p in weights.items()
               if not key.endswith('.attn.bias') and not (config.tie and key == 'lm_head.weight'))


def head(name):
    yield from ['---', 'library_name: transformers', 'pipeline_tag: text-generation', 'tags:', '- flatgpt',
                '---', '', f'# {name}', '',
                'A language model that continues a text. It was not trained to answer questions, to follow '
                'instructions or to avoid harm.', '',
                'License: not chosen yet. Whoever publishes this model chooses one (`license:` at the top of '
                'this file).', '']


def facts(state, config, tokenizer_state, dtype):
    kind = tokenizer_state['kind']
    tokenizer = TOKENIZERS.get(kind) or f"BPE ({tokenizer_state.get('name')})"
    rows = [('architecture', f"{CLASSES[preset_of(config)]}, {config.n_layer} layers, {config.n_head} heads, "
                             f"{config.n_embd} channels"),
            ('parameters', f"{n_parameters(state['model'], config):,}"),
            ('context', f"{config.block_size:,} tokens"),
            ('vocabulary', f"{config.vocab_size:,} ids, {tokenizer}"),
            ('weights', dtype)]
    yield from table(rows)


def table(rows):
    yield from ['| | |', '|---|---|', *(f"| {name} | {value} |" for name, value in rows), '']


def data(run, state):
    found = run.get('dataset') or {}
    name = found.get('name') or state['config'].get('dataset')
    if not name:
        return
    rows = [('dataset', name)]
    rows += [(split, f"{part.get('tokens', 0):,} tokens") for split, part in found.get('splits', {}).items()]
    rows += [(key, found[key]) for key in ('source', 'command') if found.get(key)]
    yield from ['## Data', '', *table(rows)]


def training(run, state):
    knobs = state['config']
    if not state['iter_num'] or not knobs:
        yield from ['## Training', '', f"The weights were read from {os.path.basename(state['path'])}.", '']
        return
    rows = [('iterations', f"{state['iter_num']:,}")]
    if state.get('tokens'):
        rows.append(('tokens', f"{state['tokens']:,}"))
    rows += [(line[:10].strip(), line[10:].replace('|', ' ')) for line in run.get('plan') or []
             if line.startswith(('batch', 'schedule', 'system'))]
    names = ('learning_rate', 'weight_decay', 'dropout', 'seed')
    rows += [(name, knobs[name]) for name in names if name in knobs]
    if state.get('seconds'):
        rows.append(('time', format_duration(state['seconds'])))
    yield from ['## Training', '', *table(rows)]
    commands = dict.fromkeys(session.get('command', '') for session in run.get('sessions', []))
    if commands:
        yield from ['By flatgpt, with', '', '```sh', *commands, '```', '']


def evaluation(eval_json, state):
    loss = state.get('evaluation', {}).get('metrics', {}).get('val_loss')
    lines = []
    if loss is not None:
        lines = [f"Loss on the beginning of the validation text, at the end of training: {loss:.4f} nats per "
                 "token.", '']
    if eval_json.get('iter') == state['iter_num']:  # else it is about other weights
        lines += eval_results(eval_json)
    if lines:
        yield from ['## Evaluation', '', *(line.replace('## By', '### By') for line in lines)]


def loading(name):
    yield from ['## Use', '', '```python', 'from transformers import pipeline',
                f"generate = pipeline('text-generation', '{name}')",
                "print(generate('The ', max_new_tokens=50)[0]['generated_text'])", '```']
