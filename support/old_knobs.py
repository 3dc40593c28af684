"""Knobs that train.py once had: what took their place. Older checkpoints are translated; a typed one gets a
line."""

REMOVED = {  # name: what to use instead
    'eval_tokens': "--eval_iters='1e6 tokens'",
    'resume_from': "--init_from=resume:PATH",
    'max_tokens': "--budget='1e9 tokens'",
    'max_epochs': "--budget='3 epochs'",
    'tokens_per_param': "--budget='20 tokens_per_param'",
    'hellaswag_interval': "--tasks=hellaswag --tasks_interval=N",
    'core_interval': "--tasks=core --tasks_interval=N",
    'core_max_per_task': "--tasks=core:N", 'max_per_task': "--tasks=core:N",
    'tasks_dir': "--data_dir: hellaswag_val.jsonl and eval_bundle/ lie there",
    'sample_growth': "--sample_interval=100x1.5",
    'dry_run': "python plan.py, with the same config and flags; add --measure to try it here",
    'world_size': "python plan.py --world_size=N, with the same config and flags",
    'gpu_memory': "python plan.py --gpu_memory=N, with the same config and flags",
    'shard_size': "--shard=N",
    'chunked_loss': "nothing: it is chosen where it saves memory",
    'max_bad_steps': "nothing: it is ten, in support/guard.py",
    'matmul_precision': "nothing: it is set in train.py",
    'write_report': "nothing: the report is always written",
    'norm_eps': "GPTConfig in model.py", 'embd_norm': "GPTConfig in model.py",
    'fused_qkv': "GPTConfig in model.py", 'init': "GPTConfig in model.py",
}


def translate(saved):
    """The knobs of a checkpoint's `config` under today's names."""
    saved = {name: value for name, value in saved.items() if isinstance(name, str)}
    units = {'max_tokens': 'tokens', 'max_epochs': 'epochs', 'tokens_per_param': 'tokens_per_param'}
    for name, unit in units.items():
        if isinstance(saved.get(name), (int, float)):
            saved['budget'] = f"{saved[name]} {unit}"
    intervals = {name: saved.get(f'{name}_interval') for name in ('hellaswag', 'core')}
    names = [name for name, interval in intervals.items() if isinstance(interval, int) and interval > 0]
    if names:
        saved.setdefault('tasks', ','.join(names))
        saved.setdefault('tasks_interval', min(intervals[name] for name in names))
    limit = saved.get('core_max_per_task', saved.get('max_per_task'))
    if isinstance(limit, int) and limit != 500 and isinstance(saved.get('tasks'), str):
        names = [name.strip() for name in saved['tasks'].split(',')]
        saved['tasks'] = ','.join(name if name in ('', 'hellaswag') else f'{name}:{limit}' for name in names)
    if isinstance(saved.get('eval_tokens'), int):
        saved['eval_iters'] = f"{saved['eval_tokens']} tokens"
    saved.setdefault('momentum', 0.95)  # of muon, when it was no knob
    growth = saved.get('sample_growth')
    interval = saved.get('sample_interval', 0)
    if isinstance(growth, float) and growth > 1 and isinstance(interval, int):
        saved['sample_interval'] = f"{interval}x{growth:g}"
    return saved


def evaluation_of_version_1(found):
    """What Evaluator remembers, from a checkpoint that was written before it had that form."""
    names = {'train': 'train_loss', 'val': 'val_loss'}
    metrics = {names.get(name, name): value for name, value in found.items()
               if name not in ('iter', 'sample')}
    done = []
    if 'train' in found:
        done.append('loss')
    if 'hellaswag' in found or 'core' in found:
        done.append('tasks')
    if 'sample' in found:
        done.append('sample')
    return {'iter': found.get('iter'), 'names': done, 'metrics': metrics}
