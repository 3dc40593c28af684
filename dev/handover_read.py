"""
One reader of dev/handover.py: opens what export.py wrote and compares it with our own network. Run by that
script in the environment that it makes.

    $ .venv-handover/bin/python dev/handover_read.py transformers JOB.json ...

Writes what it found beside each job.json.
"""

import json
import logging
import math
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np
import torch

from model import load

NEW = 100  # tokens to generate greedily


def greedy(net, tokenizer, prompt):
    """Prompt and NEW tokens, as ids."""
    idx = torch.tensor([tokenizer.encode_prompt(prompt)])
    return net.generate(idx, NEW, temperature=0)[0].tolist()


def logits_of(net, ids):
    """(T, V) float32"""
    with torch.no_grad():
        return net(torch.tensor([ids]), full_logits=True)[0][0].float().numpy()


def of_transformers(job, net, tokenizer):
    """A pipeline without a warning, the same greedy texts, the same logits."""
    import transformers
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger('transformers').addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        pipe = transformers.pipeline('text-generation', job['folder'])
        equal = 0
        for prompt in job['prompts']:
            text = pipe(prompt, max_new_tokens=NEW, do_sample=False)[0]['generated_text']
            equal += text == tokenizer.decode(greedy(net, tokenizer, prompt))
    told += [str(w.message) for w in caught if 'transformers' in w.filename]
    logging.getLogger('transformers').removeHandler(handler)  # below it tells that a text is long
    ids = greedy(net, tokenizer, job['prompts'][0])
    with torch.no_grad():
        theirs = pipe.model(torch.tensor([ids])).logits[0].float().numpy()
    same_ids = pipe.tokenizer(job['text'])['input_ids'] == tokenizer.encode(job['text']).tolist()
    largest = float(np.abs(theirs - logits_of(net, ids)).max())
    return {'greedy': equal, 'of': len(job['prompts']), 'logits': largest, 'ids': same_ids, 'warnings': told}


def open_llama(path, n_ctx):
    import llama_cpp
    # keys and values in float32 too: they are float16 by default
    f32 = llama_cpp.GGML_TYPE_F32
    return llama_cpp.Llama(str(path), n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=n_ctx, logits_all=True,
                           verbose=False, n_threads=1, n_threads_batch=1, type_k=f32, type_v=f32)


def of_llama(job, net, tokenizer):
    """The same ids, the same greedy tokens in f32, logits by dtype."""
    found = {'logits': {}, 'scale': None}
    T, V = net.config.block_size, net.config.vocab_size
    ids = greedy(net, tokenizer, job['prompts'][0])
    want = logits_of(net, ids)
    found['scale'] = float(want.std())
    for dtype, path in job['gguf'].items():
        llama = open_llama(path, T)
        llama.eval(ids)
        found['logits'][dtype] = float(np.abs(llama.scores[:len(ids), :V] - want).max())
        if dtype != 'f32':
            continue
        text, equal = job['text'], 0
        their_ids = llama.tokenize(text.encode(), add_bos=False, special=False)
        found['ids'] = their_ids == tokenizer.encode(text).tolist()
        for prompt in job['prompts']:
            theirs = greedy_llama(llama, tokenizer.encode_prompt(prompt))
            equal += theirs == greedy(net, tokenizer, prompt)
        found['greedy'], found['of'] = equal, len(job['prompts'])
        # and through its own interface, text in and text out
        done = llama(job['prompts'][0], max_tokens=NEW, temperature=0.0, echo=True)['choices'][0]['text']
        found['text'] = done == tokenizer.decode(ids)
    return found


def greedy_llama(llama, prompt):
    """Prompt and NEW tokens, as ids, each the one with the highest logit."""
    llama.reset()
    ids, new = list(prompt), list(prompt)
    for _ in range(NEW):
        llama.eval(new)
        new = [int(np.argmax(llama.scores[len(ids) - 1]))]
        ids += new
    return ids


def of_vllm(job, net, tokenizer):
    """The same greedy texts, in float32, from ids."""
    from vllm import LLM, SamplingParams
    llm = LLM(job['folder'], dtype='float32', max_model_len=net.config.block_size, enforce_eager=True)
    ids = [tokenizer.encode_prompt(prompt) for prompt in job['prompts']]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    done = llm.generate([{'prompt_token_ids': prompt} for prompt in ids], params)
    equal = sum(prompt + list(theirs.outputs[0].token_ids) == greedy(net, tokenizer, text)
                for prompt, theirs, text in zip(ids, done, job['prompts']))
    return {'greedy': equal, 'of': len(ids)}


def of_perplexity(job, net, tokenizer):
    """Loss over the windows of a text: ours in float32, llama.cpp's by dtype."""
    T = net.config.block_size
    ids = tokenizer.encode(Path(job['val']).read_text()).tolist()[:job['val_tokens']]
    windows = [ids[i:i + T + 1] for i in range(0, len(ids) - T, T)]
    found = {'tokens': len(windows) * T, 'ours': perplexity(windows, lambda w: logits_of(net, w[:-1]))}
    for dtype, path in job['gguf'].items():
        llama = open_llama(path, T)

        def logits(window):
            llama.reset()
            llama.eval(window[:-1])
            return llama.scores[:T]

        found[dtype] = perplexity(windows, logits)
    return found


def perplexity(windows, logits_of_window):
    total = 0.0
    for window in windows:
        logits = torch.from_numpy(np.array(logits_of_window(window), dtype=np.float32))
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:])).item()
    return math.exp(total / len(windows))


def of_lm_eval(job, net, tokenizer):
    """lm-evaluation-harness on questions of ours: how many it gets right, and how many we do."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    folder = Path(job['folder']).parent
    task = {'task': 'endings', 'dataset_path': 'json', 'validation_split': 'validation',
            'dataset_kwargs': {'data_files': {'validation': job['questions']}},
            'output_type': 'multiple_choice', 'doc_to_text': '{{context}}', 'doc_to_target': 'label',
            'doc_to_choice': 'endings', 'target_delimiter': '', 'metric_list': [{'metric': 'acc'}]}
    rolling = {**task, 'task': 'rolling', 'output_type': 'loglikelihood_rolling', 'doc_to_text': '',
               'doc_to_target': '{{context}}', 'metric_list': [{'metric': 'bits_per_byte'}]}
    del rolling['doc_to_choice'], rolling['target_delimiter']
    tasks = folder / 'tasks'
    tasks.mkdir(exist_ok=True)
    for content in (task, rolling):
        (tasks / f"{content['task']}.yaml").write_text(json.dumps(content))  # JSON is YAML
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    done = lm_eval.simple_evaluate('hf', model_args=f"pretrained={job['folder']},dtype=float32", batch_size=8,
                                   device='cpu', tasks=['endings', 'rolling'], task_manager=manager)
    done = done['results']
    questions = [json.loads(line) for line in open(job['questions'])]
    right = sum(answer(net, tokenizer, question) == question['label'] for question in questions)
    return {'acc': done['endings']['acc,none'], 'ours': right / len(questions), 'of': len(questions),
            'bits_per_byte': done['rolling']['bits_per_byte,none']}


def answer(net, tokenizer, question):
    """The ending with the highest probability."""
    scores = []
    begin = len(tokenizer.encode(question['context']))
    for ending in question['endings']:
        ids = tokenizer.encode(question['context'] + ending).tolist()
        loss = torch.from_numpy(logits_of(net, ids[:-1])).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        scores.append(loss[begin - 1:].sum().item())
    return int(np.argmax(scores))


READERS = {'transformers': of_transformers, 'llama': of_llama, 'perplexity': of_perplexity,
           'lm_eval': of_lm_eval, 'vllm': of_vllm}

if __name__ == '__main__':
    reader = sys.argv[1]
    torch.set_num_threads(1)
    for path in map(Path, sys.argv[2:]):
        job = json.loads(path.read_text())
        try:
            found = READERS[reader](job, *load(job['out']))
        except Exception as e:  # the others shall be read all the same
            found = {'error': f'{type(e).__name__}: {e}'.strip().splitlines()[0][:200]}
        path.with_name(f'{reader}.json').write_text(json.dumps(found))
        print(job['name'], reader, found, flush=True)
