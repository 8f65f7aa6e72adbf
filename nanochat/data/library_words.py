"""Says in the user's language what an exception of Python or a library reports.

A message quotes such an exception as its reason, and a Chinese sentence should not end in English
words where the reason is a common one. Less common reasons stay in the library's own words.
"""

import errno
import json
import socket

from nanochat.common import tr


def in_words(failure: BaseException) -> str:
    """Return what an exception reports, as a part of a sentence.

    Errors of JSON, of files and connections, of character encodings and missing keys are in the
    user's language. Other exceptions have their own text, or their type's name if they have none.
    """
    if isinstance(failure, json.JSONDecodeError):
        return tr(
            "{problem}, line {line}, column {column}",
            problem=json_problem(failure),
            line=failure.lineno,
            column=failure.colno,
        )
    if isinstance(failure, OSError) and failure.strerror:
        problem = os_problem(failure)
        return f"{problem}: {failure.filename}" if failure.filename else problem
    if isinstance(failure, UnicodeDecodeError):
        return tr(
            "it is not {encoding} from byte {start:,} on",
            encoding=failure.encoding,
            start=failure.start,
        )
    if isinstance(failure, KeyError) and failure.args:
        return tr("{name} is missing", name=failure.args[0])
    return str(failure) or type(failure).__name__


def json_problem(failure: json.JSONDecodeError) -> str:
    """Return what breaks a JSON text, without the place."""
    problems = {
        "Expecting value": tr("a value is missing"),
        "Expecting property name": tr("a key in double quotes is missing"),
        "Expecting ':'": tr("a colon is missing"),
        "Expecting ','": tr("a comma is missing"),
        "Unterminated string": tr("a text has no closing quotation mark"),
        "Invalid control character": tr("a text has a bare line break or control character"),
        "Invalid \\escape": tr("a backslash stands before a wrong character"),
        "Invalid \\u": tr("a backslash and u need four hexadecimal digits after them"),
        "Extra data": tr("more text follows the value"),
        "Illegal trailing comma": tr("a comma stands before a closing bracket"),
        "Unexpected UTF-8 BOM": tr("the text begins with a byte order mark"),
    }
    for start, words in problems.items():
        if failure.msg.startswith(start):
            return words
    return failure.msg


def os_problem(failure: OSError) -> str:
    """Return the reason of an operating system's error, without the name of the file."""
    if isinstance(failure, socket.gaierror):  # its numbers differ between systems
        return tr("the name of the host is unknown")
    problems = {
        errno.ENOENT: tr("no such file or folder"),
        errno.EACCES: tr("permission denied"),
        errno.EPERM: tr("the operation is not permitted"),
        errno.EROFS: tr("the file system can only be read"),
        errno.ENOSPC: tr("no space is left on the disk"),
        errno.EDQUOT: tr("the disk quota is used up"),
        errno.EIO: tr("reading or writing failed (input/output error)"),
        errno.EEXIST: tr("the file exists already"),
        errno.EISDIR: tr("it is a folder"),
        errno.ENOTDIR: tr("a part of the path is not a folder"),
        errno.ENOTEMPTY: tr("the folder is not empty"),
        errno.ENAMETOOLONG: tr("the name is too long"),
        errno.ELOOP: tr("too many links follow each other"),
        errno.EBUSY: tr("the file or device is in use"),
        errno.EMFILE: tr("the process has too many open files"),
        errno.ENFILE: tr("the host has too many open files"),
        errno.ENOMEM: tr("memory is used up"),
        errno.ESTALE: tr("the network file system has lost the file"),
        errno.EPIPE: tr("the reader has left"),
        errno.ECONNREFUSED: tr("the connection was refused"),
        errno.ECONNRESET: tr("the connection was reset"),
        errno.ETIMEDOUT: tr("the connection timed out"),
        errno.EHOSTUNREACH: tr("the host cannot be reached"),
        errno.ENETUNREACH: tr("the network cannot be reached"),
        errno.EADDRINUSE: tr("the address is in use"),
        errno.EADDRNOTAVAIL: tr("this host has no such address"),
    }
    return problems.get(failure.errno or 0, failure.strerror or str(failure))
