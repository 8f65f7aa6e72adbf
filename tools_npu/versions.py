"""Picks the torch_npu that fits a CANN and a Python, also for versions outside the table."""

from __future__ import annotations

import re
from typing import NamedTuple

# The oldest versions that the project supports; set-up refuses anything older.
PYTHON_FLOOR = (3, 10)
TORCH_FLOOR = (2, 7)
CANN_FLOOR = "8.3.RC1"
# An older CANN needs numpy < 2 up to Python 3.12. No torch_npu for it has a wheel for Python 3.13.
NUMPY_2_FLOOR = "9.0.0"
GLIBC_FLOOR = (2, 28)


class Row(NamedTuple):
    """A release of torch_npu, the CANN it was built for, and the newest Python with a wheel."""

    torch_npu: str
    cann: str
    python: tuple[int, int]


# The pairs in the vendor's table, the best first. Every release has wheels for Python 3.10.
TABLE = (
    Row("2.12.0", "9.1.0", (3, 13)),
    Row("2.11.0", "9.1.0", (3, 13)),
    Row("2.10.0.post4", "9.1.0", (3, 13)),
    Row("2.9.0.post6", "9.1.0", (3, 13)),
    Row("2.7.1.post8", "9.1.0", (3, 13)),
    Row("2.10.0.post2", "9.0.0", (3, 13)),
    Row("2.9.0.post2", "9.0.0", (3, 13)),
    Row("2.8.0.post4", "9.0.0", (3, 13)),
    Row("2.7.1.post4", "9.0.0", (3, 13)),
    Row("2.9.0", "8.5.0", (3, 12)),
    Row("2.8.0.post2", "8.5.0", (3, 12)),
    Row("2.7.1.post2", "8.5.0", (3, 12)),
    Row("2.8.0", "8.3.RC1", (3, 11)),
    Row("2.7.1", "8.3.RC1", (3, 11)),
)
# The vendor's table does not list this release. It was built after CANN 9.1, so a newer CANN gets
# it with a warning.
NEWEST = Row("2.14.0", "9.1.0", (3, 14))
# The torch with which vllm-ascend, ms-swift and LLaMA-Factory are installed on CANN 9.1.
SHARED_TORCH = (2, 10)
# The contract with torch_npu is tested on the oldest release, and on the last known patch of every
# minor.
OLDEST = "2.7.1"
LAST_PATCHES = (
    "2.7.1.post11",
    "2.8.0.post5",
    "2.9.1",
    "2.10.0.post7",
    "2.11.0.post3",
    "2.12.0.post3",
    "2.13.0",
    NEWEST.torch_npu,
)


def cann_key(version: str) -> tuple[int, int, int, int] | None:
    """Return a CANN version as a tuple that sorts, or None if the text is not a version.

    8.3.RC1 comes before 8.3.0.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.?(RC|T|alpha|beta)?\.?(\d+))?", version.strip(), re.I)
    if not match:
        return None
    major, minor, preview, patch = match.groups()
    is_final = 0 if preview else 1
    return int(major), int(minor), is_final, int(patch or 0)


def numpy_for(cann: str) -> int:
    """Return the major version of numpy that works with a CANN.

    If the version of CANN is not known, it is 1, which works everywhere.
    """
    key = cann_key(cann)
    floor = cann_key(NUMPY_2_FLOOR)
    return 2 if key and floor and key >= floor else 1


def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a package version, such as (2, 9, 0) for 2.9.0.post2."""
    match = re.match(r"\d+(\.\d+)*", version.strip())
    return tuple(map(int, match[0].split("."))) if match else ()


def order(version: str) -> tuple[tuple[int, ...], int]:
    """Return a package version as a tuple that sorts, such as ((2, 9, 0), 2) for 2.9.0.post2."""
    match = re.search(r"post(\d+)", version)
    patch = int(match[1]) if match else 0
    return release(version), patch


def torch_for(torch_npu: str) -> str:
    """Return the version of torch that a torch_npu extends, which has the same release numbers."""
    return ".".join(map(str, release(torch_npu)))


class Pick(NamedTuple):
    """The pair to install, or a refusal.

    `warning` and `refusal` are texts in English and Chinese, and empty if there is none.
    """

    torch_npu: str
    torch: str
    python: tuple[int, int]  # the newest Python for which torch_npu has a wheel
    warning: tuple[str, str] = ("", "")
    refusal: tuple[str, str] = ("", "")


def refuse(english: str, chinese: str) -> Pick:
    """Return a refusal, with its reason and the next step in both languages."""
    return Pick("", "", (0, 0), refusal=(english, chinese))


def pick_of(row: Row, warning: tuple[str, str] = ("", "")) -> Pick:
    """Return the pair in a row of the table, with a warning if there is one."""
    return Pick(row.torch_npu, torch_for(row.torch_npu), row.python, warning)


def resolve(cann: str) -> Pick:
    """Return the best pair for an installed CANN, or a refusal with the reason."""
    key = cann_key(cann)
    floor = cann_key(CANN_FLOOR)
    if key is None or floor is None:
        return refuse(
            f"the CANN version {cann!r} cannot be read. Name the torch_npu for it: bash "
            "setup_ascend.sh --torch-npu VERSION",
            f"无法识别 CANN 版本 {cann!r}。请指定 torch_npu：bash setup_ascend.sh --torch-npu 版本号",
        )
    if key < floor:
        return refuse(
            f"CANN {cann} is too old: {CANN_FLOOR} or later is needed. Upgrade the CANN toolkit "
            "and its ops (kernels) package; upgrade the driver too if CANN's release notes ask for "
            "it",
            f"CANN {cann} 版本过低：需要 {CANN_FLOOR} 或更高版本。请升级 CANN toolkit 和算子包（kernels/ops）；"
            "如果 CANN 的版本说明要求，也要升级驱动",
        )
    row = nearest_row(key)
    if key == cann_key(row.cann):
        return pick_of(row)
    if row is NEWEST:
        return pick_of(
            row,
            (
                f"CANN {cann} is newer than the table: torch_npu {row.torch_npu}, the newest known "
                "release, is installed. To choose another release: --torch-npu VERSION",
                f"CANN {cann} 比配套表新：选装目前已知最新的 torch_npu {row.torch_npu}。"
                "想换版本：--torch-npu 版本号",
            ),
        )
    return pick_of(
        row,
        (
            f"CANN {cann} is not in the table: torch_npu {row.torch_npu}, which was built for "
            f"{row.cann}, is installed. To choose another release: --torch-npu VERSION",
            f"配套表里没有 CANN {cann}：选装为 {row.cann} 构建的 torch_npu {row.torch_npu}。"
            "想换版本：--torch-npu 版本号",
        ),
    )


def nearest_row(key: tuple[int, int, int, int]) -> Row:
    """Return the best row for a CANN's minor version, or else for the newest older CANN.

    A CANN that is newer than the whole table gets NEWEST.
    """
    keys = [cann_key(row.cann) or key for row in TABLE]
    for row, row_key in zip(TABLE, keys):
        if row_key[:2] == key[:2]:
            return row
    older = [row for row, row_key in zip(TABLE, keys) if row_key < key]
    return NEWEST if older[0] is TABLE[0] else older[0]


def explain(cann: str, pick: Pick, named: bool) -> tuple[str, str]:
    """Return which pair is chosen for a CANN and why, and which others fit, in both languages.

    `named` is set if the user named the version.
    """
    same_cann = [row.torch_npu for row in TABLE if cann_key(row.cann) == cann_key(cann)]
    alternatives = [name for name in same_cann if name != pick.torch_npu]
    chosen = f"CANN {cann or '?'} -> torch_npu {pick.torch_npu} -> torch {pick.torch}"
    if named:
        return f"{chosen}, as you asked", f"{chosen}（由你指定）"
    if not alternatives:
        return chosen, chosen
    english = f"{', '.join(alternatives)} fit too"
    chinese = f"{'、'.join(alternatives)} 也配套"
    shared = [name for name in alternatives if release(name)[:2] == SHARED_TORCH]
    if shared:
        english += f"; vllm-ascend, ms-swift and LLaMA-Factory use {shared[0]}"
        chinese += f"；vllm-ascend、ms-swift 和 LLaMA-Factory 用 {shared[0]}"
    return (
        f"{chosen}: the newest release that the vendor pairs with this CANN. {english}. To choose "
        "one: --torch-npu VERSION",
        f"{chosen}：厂商为这个 CANN 配套的最新版本。{chinese}。想换版本：--torch-npu 版本号",
    )


def pick_named(torch_npu: str) -> Pick:
    """Return the pair for a torch_npu that the user names, or a refusal if it is too old."""
    release_numbers = release(torch_npu)
    if len(release_numbers) < 2 or release_numbers[:2] < TORCH_FLOOR:
        return refuse(
            f"torch_npu {torch_npu} is too old: {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]} or later is "
            "needed. Name a newer one, or leave out --torch-npu and NANOCHAT_TORCH_NPU to have one "
            "picked for your CANN",
            f"torch_npu {torch_npu} 版本过低：需要 {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]} 或更高版本。请换一个更新的版本，"
            "或者不设 --torch-npu 和 NANOCHAT_TORCH_NPU，让程序按 CANN 选择",
        )
    for row in (*TABLE, NEWEST):
        if row.torch_npu == torch_npu:
            return pick_of(row)
    return Pick(torch_npu, torch_for(torch_npu), (3, 13))


class Fit(NamedTuple):
    """Whether installed versions fit each other, as PASS, WARN or FAIL with the reason."""

    status: str
    english: str = ""
    chinese: str = ""


def pair_fits(torch: str, torch_npu: str) -> Fit:
    """Return whether torch and torch_npu have the same major.minor and are new enough."""
    if release(torch)[:2] == release(torch_npu)[:2]:
        if release(torch)[:2] < TORCH_FLOOR:
            return Fit(
                "FAIL",
                f"torch {torch} is too old: 2.7 or later is needed",
                f"torch {torch} 版本过低：需要 2.7 或更高",
            )
        return Fit("PASS")
    return Fit(
        "FAIL",
        f"torch {torch} and torch_npu {torch_npu} are different releases",
        f"torch {torch} 和 torch_npu {torch_npu} 的版本不一致",
    )


def cann_fits(torch_npu: str, cann: str) -> Fit:
    """Return whether a torch_npu works with a CANN."""
    key = cann_key(cann)
    if key is None:
        return Fit("WARN", "the version of CANN is not known", "不知道 CANN 的版本")
    minor = release(torch_npu)[:2]
    same_minor = [row for row in TABLE if release(row.torch_npu)[:2] == minor]
    if not same_minor:
        if key < (cann_key(NEWEST.cann) or key):
            return Fit(
                "FAIL",
                f"torch_npu {torch_npu} probably needs CANN {NEWEST.cann} or later, but CANN is "
                f"{cann}",
                f"torch_npu {torch_npu} 可能需要 CANN {NEWEST.cann} 或更高，当前是 {cann}",
            )
        return Fit(
            "WARN",
            f"torch_npu {torch_npu} is not in the table; CANN {cann} is probably new enough",
            f"配套表里没有 torch_npu {torch_npu}；CANN {cann} 应该够新",
        )
    # As far as we know, an unlisted release needs at least the CANN of the listed one before it.
    not_newer = [row for row in same_minor if order(row.torch_npu) <= order(torch_npu)]
    row = max(not_newer, key=lambda row: order(row.torch_npu)) if not_newer else same_minor[-1]
    is_listed = row.torch_npu == torch_npu
    needed_key = cann_key(row.cann) or key
    if key[:2] < needed_key[:2]:
        return Fit(
            "FAIL",
            f"torch_npu {torch_npu} was built for CANN {row.cann}, but CANN {cann} is older",
            f"torch_npu {torch_npu} 需要 CANN {row.cann}，当前的 {cann} 太旧",
        )
    if is_listed and key == needed_key:
        return Fit("PASS")
    if not is_listed:
        return Fit(
            "WARN",
            f"torch_npu {torch_npu} is not in the table; it needs CANN {row.cann} or later, and "
            f"CANN is {cann}",
            f"配套表里没有 torch_npu {torch_npu}；它需要 CANN {row.cann} 或更高，当前是 {cann}",
        )
    return Fit(
        "WARN",
        f"torch_npu {torch_npu} was built for CANN {row.cann}, but CANN {cann} is installed",
        f"torch_npu {torch_npu} 是为 CANN {row.cann} 构建的，当前装的是 {cann}",
    )


def numpy_fits(numpy: str, cann: str, python: tuple[int, int]) -> Fit:
    """Return whether the compiler of a CANN works with a numpy on this Python."""
    if python >= (3, 13) or cann_key(cann) is None or release(numpy)[0] <= numpy_for(cann):
        return Fit("PASS")
    return Fit(
        "FAIL",
        f"CANN {cann} needs numpy 1, but numpy is {numpy}: operators fail with error 500001",
        f"CANN {cann} 需要 numpy 1，当前是 {numpy}：算子会报错 500001",
    )


def remedy(fit: Fit, cann: str) -> tuple[str, str]:
    """Return what to do if a torch_npu may not work with a CANN, in English and Chinese.

    The set-up keeps a torch_npu that loads and is not known to be wrong. For a WARN, it therefore
    needs to be told which version to install.
    """
    picked = resolve(cann).torch_npu
    if fit.status == "WARN" and picked:
        return (
            f"nothing if the lines below pass; else bash setup_ascend.sh --torch-npu {picked}",
            f"如果下面各项都通过，不用处理；否则运行 bash setup_ascend.sh --torch-npu {picked}",
        )
    return (
        "bash setup_ascend.sh --fix (it picks the torch_npu that fits)",
        "bash setup_ascend.sh --fix（会自动选装配套的 torch_npu）",
    )
