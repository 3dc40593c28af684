"""
The packages in pyproject.toml, for pip.

    $ python -m pip install $(python dev/packages.py test plot)   # the core and these groups
    $ python dev/packages.py --write                              # requirements.txt: what uv installs, too
"""

import sys
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def read():
    return tomllib.loads((REPO / 'pyproject.toml').read_text(encoding='utf-8'))


def packages(*groups):
    """The core's and those of the groups, each as NAME==VERSION."""
    content = read()
    found = [content['project']['dependencies'], *(content['dependency-groups'][group] for group in groups)]
    return [package for some in found for package in some]


def requirements():
    """The text of requirements.txt: the core, and the groups that uv installs unasked."""
    lines = packages(*read()['tool']['uv']['default-groups'])
    return '\n'.join(["# made from pyproject.toml: python dev/packages.py --write", *lines, ''])


if __name__ == '__main__':
    if sys.argv[1:] == ['--write']:
        (REPO / 'requirements.txt').write_text(requirements(), encoding='utf-8')
    else:
        print(' '.join(packages(*sys.argv[1:])))
