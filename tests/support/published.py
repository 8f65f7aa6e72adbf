"""Small data sets in the exact published schemas of C-Eval, CMMLU, MMLU-Pro and MGSM, written where a test asks."""

import csv
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks import ceval, cmmlu

CEVAL = pa.schema([("id", pa.int32()), *((name, pa.string()) for name in
                   ("question", "A", "B", "C", "D", "answer", "explanation"))])  # fmt: skip
CMMLU = ("", "Question", "A", "B", "C", "D", "Answer")
MMLU_PRO = pa.schema([("question_id", pa.int64()), ("question", pa.string()), ("options", pa.list_(pa.string())),
                      ("answer", pa.string()), ("answer_index", pa.int64()), ("cot_content", pa.string()),
                      ("category", pa.string()), ("src", pa.string())])  # fmt: skip
MGSM = pa.schema([("question", pa.string()), ("answer", pa.string()), ("answer_number", pa.int32()),
                  ("equation_solution", pa.string())])  # fmt: skip


def parquet(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path)


def ceval_row(subject: str, number: int, split: str) -> dict[str, Any]:
    """A sum whose answer goes through the letters; some choices look like other types than text."""
    right = number % 4
    choices = [f"{number + 1 + place - right}" for place in range(4)]
    question = f"{subject}（{split}）：{number}加1等于____"
    why = "" if split == "val" else f"{number}+1={number + 1}"
    letters = dict(zip("ABCD", choices, strict=True))
    return {"id": number, "question": question, **letters, "answer": "ABCD"[right], "explanation": why}


def write_ceval(folder: Path, questions: int = 2, as_csv: bool = False) -> None:
    """A copy of the hub's repository, or of the authors' zip."""
    for subject in ceval.SUBJECTS:
        for split, count in (("val", questions), ("dev", 5)):
            rows = [ceval_row(subject, number, split) for number in range(count)]
            if as_csv:
                path = folder / split / f"{subject}_{split}.csv"
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "w", encoding="utf-8", newline="") as f:
                    writer = csv.DictWriter(f, CEVAL.names, extrasaction="ignore")
                    writer.writeheader()
                    writer.writerows(rows)
            else:
                parquet(folder / subject / f"{split}-00000-of-00001.parquet", rows, CEVAL)


def write_cmmlu(folder: Path) -> None:
    """The authors' zip, unpacked: the first column has no name."""
    for subject in cmmlu.SUBJECTS:
        for split, count in (("test", 2), ("dev", 5)):
            path = folder / split / f"{subject}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8", newline="") as f:
                writer = csv.writer(f)
                writer.writerow(CMMLU)
                for n in range(count):
                    writer.writerow(
                        [n, f"{subject}：下列哪个是“{n}”？\n请选择", "1.50", "None", "01", "N/A", "ABCD"[n % 4]]
                    )


def write_mmlu_pro(folder: Path) -> None:
    def row(number: int, split: str) -> dict[str, Any]:
        options = [f"option {place}" for place in range(10 if number % 2 == 0 else 4)]
        return {"question_id": 70 + number, "question": f"{split} question {number}?", "options": options,
                "answer": "ABCDEFGHIJ"[number % len(options)], "answer_index": number % len(options),
                "cot_content": "A: Let's think step by step.", "category": ("math", "law")[number // 5 % 2],
                "src": "ori_mmlu-x"}  # fmt: skip

    for split, count in (("test", 10), ("validation", 10)):
        rows = [row(number, split) for number in range(count)]
        parquet(folder / "data" / f"{split}-00000-of-00001.parquet", rows, MMLU_PRO)


def write_mgsm(folder: Path, as_tsv: bool = False) -> None:
    def row(number: int, shown: bool) -> dict[str, Any]:
        question = f'小明有{number}个苹果，又买了"{number}"个，一共有几个？'
        return {"question": f"问题：{question}" if shown else question, "answer_number": 2 * number,
                "answer": f"逐步解答：{number}加{number}是{2 * number}。答案是 {2 * number}。" if shown else None,
                "equation_solution": f"{number} + {number} = {2 * number}." if shown else None}  # fmt: skip

    parquet(folder / "zh" / "train" / "0000.parquet", [row(n, True) for n in range(1, 9)], MGSM)
    tests = [row(n, False) for n in range(600, 606)]
    if as_tsv:
        lines = (f"{one['question']}\t{one['answer_number']:,}\n" for one in tests)
        (folder / "mgsm_zh.tsv").write_text("".join(lines), encoding="utf-8")
    else:
        parquet(folder / "zh" / "test" / "0000.parquet", tests, MGSM)
