"""Which torch_npu fits which CANN and Python, and what to do where the table has no answer."""

from __future__ import annotations

import re
from typing import NamedTuple

# Floors of the project; below them nothing is tried.
PYTHON_FLOOR = (3, 10)
TORCH_FLOOR = (2, 7)
CANN_FLOOR = "8.3.RC1"
GLIBC_FLOOR = (2, 28)


class Row(NamedTuple):
    """A release of torch_npu, the CANN it was built for, and the newest Python that has a wheel of it."""

    torch_npu: str
    cann: str
    python: tuple[int, int]


# The releases that the vendor's own table pairs with a CANN, best first; wheels begin at Python 3.10 or earlier.
TABLE = (
    Row("2.12.0", "9.1.0", (3, 13)),
    Row("2.11.0", "9.1.0", (3, 13)),
    Row("2.10.0.post4", "9.1.0", (3, 13)),
    Row("2.9.0.post6", "9.1.0", (3, 13)),
    Row("2.7.1.post8", "9.1.0", (3, 13)),
    Row("2.9.0.post2", "9.0.0", (3, 13)),
    Row("2.8.0.post4", "9.0.0", (3, 13)),
    Row("2.7.1.post4", "9.0.0", (3, 13)),
    Row("2.9.0", "8.5.0", (3, 12)),
    Row("2.8.0.post2", "8.5.0", (3, 12)),
    Row("2.7.1.post2", "8.5.0", (3, 12)),
    Row("2.8.0", "8.3.RC1", (3, 11)),
    Row("2.7.1", "8.3.RC1", (3, 11)),
)
# Not in the vendor's table: built after CANN 9.1, so it is taken for a CANN newer than that, with a warning.
NEWEST = Row("2.13.0", "9.1.0", (3, 14))


def cann_key(version: str) -> tuple[int, int, int, int] | None:
    """A CANN version as something that sorts: 8.3.RC1 before 8.3.0; None if it is no version."""
    found = re.match(r"(\d+)\.(\d+)(?:\.?(RC|T|alpha|beta)?\.?(\d+))?", version.strip(), re.I)
    if not found:
        return None
    return int(found[1]), int(found[2]), 0 if found[3] else 1, int(found[4] or 0)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a package's version, `post` and local parts apart: 2.9.0.post2 -> (2, 9, 0)."""
    found = re.match(r"\d+(\.\d+)*", version.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def order(version: str) -> tuple[tuple[int, ...], int]:
    """A package's version as something that sorts: 2.9.0.post2 -> ((2, 9, 0), 2)."""
    found = re.search(r"post(\d+)", version)
    return release(version), int(found[1]) if found else 0


def torch_for(torch_npu: str) -> str:
    """The torch that a torch_npu extends: the same release."""
    return ".".join(str(part) for part in release(torch_npu))


class Pick(NamedTuple):
    """The pair to install; `warning` and `refusal` are (English, Chinese), empty if there is none."""

    torch_npu: str
    torch: str
    python: tuple[int, int]  # the newest Python that has this wheel
    warning: tuple[str, str] = ("", "")
    refusal: tuple[str, str] = ("", "")


def refuse(english: str, chinese: str) -> Pick:
    return Pick("", "", (0, 0), refusal=(english, chinese))


def pick_of(row: Row, warning: tuple[str, str] = ("", "")) -> Pick:
    return Pick(row.torch_npu, torch_for(row.torch_npu), row.python, warning)


def resolve(cann: str) -> Pick:
    """The newest torch_npu for an installed CANN, or why there is none."""
    key, floor = cann_key(cann), cann_key(CANN_FLOOR)
    if key is None or floor is None:
        return refuse(f"{cann!r} is not a CANN version that can be read", f"无法识别 CANN 版本 {cann!r}")
    if key < floor:
        return refuse(
            f"CANN {cann} is too old: {CANN_FLOOR} or later is needed. Upgrade the CANN toolkit and its ops (kernels) "
            "package, and the driver if its release notes say so",
            f"CANN {cann} 版本过低：需要 {CANN_FLOOR} 或更高版本。请升级 CANN toolkit 与算子包（kernels/ops），"
            "必要时同时升级驱动",
        )
    same = [row for row in TABLE if (cann_key(row.cann) or key)[:2] == key[:2]]
    older = [row for row in TABLE if (cann_key(row.cann) or key) < key]
    row = same[0] if same else NEWEST if older[0] is TABLE[0] else older[0]
    if key == cann_key(row.cann):
        return pick_of(row)
    if row is NEWEST:
        return pick_of(row, (f"CANN {cann} is newer than the table: torch_npu {row.torch_npu} is the newest known",
                             f"CANN {cann} 比配套表新：采用目前已知最新的 torch_npu {row.torch_npu}"))  # fmt: skip
    return pick_of(row, (f"CANN {cann} is not in the table: torch_npu {row.torch_npu}, built for {row.cann}, is taken",
                         f"CANN {cann} 不在配套表中：采用为 {row.cann} 构建的 torch_npu {row.torch_npu}"))  # fmt: skip


def asked(torch_npu: str) -> Pick:
    """The pair of a torch_npu that the user names."""
    number = release(torch_npu)
    if len(number) < 2 or number[:2] < TORCH_FLOOR:
        return refuse(
            f"torch_npu {torch_npu} is too old: {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]} or later is needed",
            f"torch_npu {torch_npu} 版本过低：需要 {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]} 或更高版本",
        )
    for row in (*TABLE, NEWEST):
        if row.torch_npu == torch_npu:
            return pick_of(row)
    return Pick(torch_npu, torch_for(torch_npu), (3, 13))


class Fit(NamedTuple):
    """How an installed pair and CANN go together: status PASS, WARN or FAIL, and why in both languages."""

    status: str
    english: str = ""
    chinese: str = ""


def pair_fits(torch: str, torch_npu: str) -> Fit:
    """torch and torch_npu must be of one major.minor."""
    if release(torch)[:2] == release(torch_npu)[:2]:
        if release(torch)[:2] < TORCH_FLOOR:
            return Fit("FAIL", f"torch {torch} is below 2.7", f"torch {torch} 低于 2.7")
        return Fit("PASS")
    return Fit("FAIL", f"torch {torch} and torch_npu {torch_npu} are of different releases",
               f"torch {torch} 与 torch_npu {torch_npu} 版本不一致")  # fmt: skip


def cann_fits(torch_npu: str, cann: str) -> Fit:
    """Whether a torch_npu may be used with a CANN."""
    key = cann_key(cann)
    if key is None:
        return Fit("WARN", "the version of CANN is not known", "无法得知 CANN 版本")
    exact = next((row for row in TABLE if row.torch_npu == torch_npu), None)
    kin = [row for row in TABLE if release(row.torch_npu)[:2] == release(torch_npu)[:2]]
    if exact is None and not kin:
        if key < (cann_key(NEWEST.cann) or key):
            return Fit("FAIL", f"torch_npu {torch_npu} needs CANN {NEWEST.cann} or later, it seems, not {cann}",
                       f"据目前所知 torch_npu {torch_npu} 需要 CANN {NEWEST.cann} 或更高，当前为 {cann}")  # fmt: skip
        return Fit("WARN", f"torch_npu {torch_npu} is not in the table; CANN {cann} should be new enough",
                   f"torch_npu {torch_npu} 不在配套表中；CANN {cann} 应当足够新")  # fmt: skip
    # One that is not listed needs at least the CANN of the one listed before it, as far as is known.
    own = order(torch_npu)
    before = [row for row in kin if order(row.torch_npu) <= own]
    row = exact or (max(before, key=lambda row: order(row.torch_npu)) if before else kin[-1])
    need = cann_key(row.cann) or key
    if key[:2] < need[:2]:
        return Fit("FAIL", f"torch_npu {torch_npu} was built for CANN {row.cann}; {cann} is older",
                   f"torch_npu {torch_npu} 需要 CANN {row.cann}；当前 {cann} 过旧")  # fmt: skip
    if exact and key == need:
        return Fit("PASS")
    if exact is None:
        return Fit("WARN", f"torch_npu {torch_npu} is newer than the table (CANN {row.cann} or later), CANN is {cann}",
                   f"torch_npu {torch_npu} 比配套表新（CANN {row.cann} 或更高），当前 CANN {cann}")  # fmt: skip
    return Fit("WARN", f"torch_npu {torch_npu} was built for CANN {row.cann}, installed is {cann}",
               f"torch_npu {torch_npu} 为 CANN {row.cann} 构建，当前为 {cann}")  # fmt: skip
