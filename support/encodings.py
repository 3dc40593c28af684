"""In which encoding a text that is not UTF-8 was probably written."""

import codecs
import re

SAMPLE = 1 << 18  # bytes that are looked at
MARKS = ((codecs.BOM_UTF8, 'utf-8-sig'), (codecs.BOM_UTF32_LE, 'utf-32'), (codecs.BOM_UTF32_BE, 'utf-32'),
         (codecs.BOM_UTF16_LE, 'utf-16'), (codecs.BOM_UTF16_BE, 'utf-16'))
# alphabets with a few letters beyond ASCII, from the most common on
LATIN = ('cp1252', 'mac-roman', 'cp1250', 'cp1254')
OTHERS = ('cp1251', 'koi8-r', 'cp866', 'cp1253', 'cp1255', 'cp1256', 'shift_jis', 'euc_jp', 'gb18030', 'big5',
          'euc_kr')


def marked(start):
    """The encoding that a byte order mark at the start of a file tells, else None."""
    return next((name for mark, name in MARKS if start.startswith(mark)), None)


def likely_encoding(content):
    """The encoding of `content`, bytes that are not UTF-8: a good guess, from a mark or from statistics."""
    content = content[:SAMPLE]
    if marked(content):
        return marked(content)
    zeros = [content[first::2].count(0) for first in (0, 1)]  # the high bytes of UTF-16
    if max(zeros) > len(content) / 10:
        return 'utf-16-be' if zeros[0] > zeros[1] else 'utf-16-le'
    letters = len(re.findall(rb'[A-Za-z\x80-\xff]', content))
    if sum(byte >= 128 for byte in content) > 0.4 * letters:
        return by_statistics(content)
    return min(LATIN, key=lambda name: oddities(content, name))  # of equals the first


def oddities(content, encoding):
    """How much of the text looks wrong in that encoding."""
    text = content.decode(encoding, 'replace')
    # signs inside words, but for apostrophes, and capitals behind small letters
    return (2 * text.count('\ufffd') + len(re.findall(r"[^\W\d_][^\w\s'’&/.,;:!?()—–-][^\W\d_]", text))
            + len(re.findall('[a-zß-ÿ][À-Þ]', text)))


def by_statistics(content):
    """Among the alphabets that have nothing but letters beyond ASCII."""
    try:
        from charset_normalizer import from_bytes  # tiktoken brings it along
        found = from_bytes(content[:1 << 16], cp_isolation=[name.replace('-', '_') for name in OTHERS]).best()
        return found.encoding.replace('koi8_r', 'koi8-r') if found else 'cp1251'
    except ImportError:
        return 'cp1251'
