"""What to say when a dataset is not there, or not whole."""

import glob
import os

from support.dataset_meta import bin_files

# what prepare.py makes by name
KNOWN = ('pystdlib', 'shakespeare_char', 'shakespeare', 'openwebtext', 'fineweb', 'fineweb_edu',
         'tinystories')


def missing(name, data_dir):
    """What to say when there is no data_dir/name/train.bin."""
    folder = os.path.join(data_dir, name)
    if os.path.isdir(os.path.join(folder, 'unfinished')):
        return f"{folder} is not finished. run its prepare.py again: it continues where it stopped"
    if glob.glob(os.path.join(glob.escape(folder), 'part_*_of_*')):
        return f"{folder} has parts that are not joined. python prepare.py {name} --join"
    if bin_files(folder, 'val'):
        return f"no train.bin in {folder}. run prepare.py for it again"
    make = f"python prepare.py {name}" + ("" if name in KNOWN else " --input=FILE_OR_FOLDER")
    folders = os.listdir(data_dir) if os.path.isdir(data_dir) else []
    have = sorted(d for d in folders if bin_files(os.path.join(data_dir, d), 'train'))
    there = f"there is: {', '.join(have)}" if have else "there is none yet"
    return (f"no dataset {name} in {data_dir} ({there}). make it from text with: {make}; for a first run on "
            "a laptop: bash runs/quickstart.sh")


def damaged(path, size, width, tokens):
    """What to say of a file of `size` bytes (-1: there is none), `width` for each id, that should have
    `tokens` of them."""
    if size <= 0:
        wrong = "is missing" if size < 0 else "is empty"
    elif size % width:
        wrong = f"has {size:,} bytes, not a multiple of {width}"
    else:
        wrong = f"has {size:,} bytes, not the {tokens * width:,} that it was made with"
    return f"{path} {wrong}. run prepare.py for this dataset again"
