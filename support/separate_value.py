"""--batch_size 32, a value that stands apart from its knob."""


def is_value(arg, kinds, positional):
    """Whether `arg`, which follows --key, is the value of a knob of these kinds. A switch takes True or
    False; another word only where it could be nothing else."""
    if arg.startswith('-') and not arg[1:2].isdigit() and arg != '-':
        return False
    if bool in kinds or not kinds:  # none: an unknown knob
        return arg.lower() in ('true', 'false') or not (positional or arg.endswith('.py'))
    return True
