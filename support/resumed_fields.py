"""Whether what a resumed checkpoint says of its run can be: a file may say anything."""

from configurator import fail


def is_count(value):
    return type(value) is int and 0 <= value < 2**62


def is_time(value):
    return type(value) in (int, float) and 0 <= value < 1e12


def is_word(value):
    return isinstance(value, str) and len(value) < 1000


def is_plain(value):
    return value is None or is_word(value) or type(value) in (int, float, bool)


def all_are(test):
    return lambda value: isinstance(value, dict) and len(value) < 1000 and all(map(test, value.values()))


def is_evaluation(value):
    """Evaluator's memory, or that of version 1."""
    it, names, metrics = value.get('iter'), value.get('names', []), value.get('metrics', value)
    return (it is None or is_count(it)) and all(map(is_word, metrics)) and (
        isinstance(names, list) and all(map(is_word, names)) and all_are(is_plain)(metrics))


FIELDS = {'seconds': is_time, 'spent': all_are(is_time), 'tokens': is_count, 'bad_steps': is_count,
          'evaluation': is_evaluation, 'trained_on': all_are(is_plain), 'environment': all_are(is_plain),
          'wandb_run_id': is_word}


def check_fields(ckpt):
    """End with a line if one of them cannot be."""
    for name, test in FIELDS.items():
        try:
            fine = name not in ckpt or test(ckpt[name])
        except (AttributeError, TypeError):
            fine = False
        if not fine:
            path = ckpt['path']
            fail(f"{path} says what cannot be ({name} is {ckpt[name]!r:.80}). take an older checkpoint, or "
                 f"start a new run from its weights: --init_from={path} --out_dir=ANOTHER")
