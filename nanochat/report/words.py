"""The words of a report in the user's language: its titles, its measures, and what they mean."""

from collections.abc import Mapping
from typing import Any

from nanochat.common import tr
from nanochat.report.summary import BASE_CORPUS, GENERAL_TEXT, PREFERENCES
from nanochat.runtime.progress import duration


def titles() -> dict[str, str]:
    """Return the title of each section, such as base_train."""
    return {
        "tok_train": tr("Tokenizer"),
        "tok_eval": tr("Tokenizer: bytes per token"),
        "base_train": tr("Base: pretraining"),
        "base_loss": tr("Base: bits per byte and samples"),
        "base_eval": tr("Base: CORE"),
        "mid_train": tr("Mid: midtraining"),
        "mid_loss": tr("Mid: bits per byte of the base corpus"),
        "mid_eval": tr("Mid: evaluation"),
        "mid_core": tr("Mid: CORE"),
        "sft_train": tr("SFT: fine-tuning"),
        "sft_loss": tr("SFT: bits per byte of the base corpus"),
        "sft_eval": tr("SFT: evaluation"),
        "sft_core": tr("SFT: CORE"),
        "rl_train": tr("RL: reinforcement learning"),
        "rl_loss": tr("RL: bits per byte of the base corpus"),
        "rl_eval": tr("RL: evaluation"),
        "rl_core": tr("RL: CORE"),
        "published_loss": tr("Published model: bits per byte and samples"),
        "published_eval": tr("Published model: evaluation"),
        "published_core": tr("Published model: CORE"),
        "tune_train": tr("Fine-tuning of a published model"),
        "tune_loss": tr("Fine-tuned published model: bits per byte and samples"),
        "tune_eval": tr("Fine-tuned published model: evaluation"),
        "tune_core": tr("Fine-tuned published model: CORE"),
    }


def measure(name: str) -> str:
    """Return the name of a measure; the names of tasks stay as they are."""
    names = {
        "bits per byte of documents": tr("bits per byte of documents"),
        "bits per byte of conversations": tr("bits per byte of conversations"),
        "bits per byte of answers in midtraining": tr("bits per byte of answers in midtraining"),
        "bits per byte of answers": tr("bits per byte of answers"),
        "bits per byte of answers of your own data": tr(
            "bits per byte of answers of your own data"
        ),
        BASE_CORPUS: tr("bits per byte of the base corpus"),
        PREFERENCES: tr("preferences of your own data that the model follows"),
        GENERAL_TEXT: tr("perplexity of general text"),
        "training loss, first step": tr("training loss, first step"),
        "training loss, last step": tr("training loss, last step"),
    }
    measure, separator, domain = name.partition(": ")
    return f"{names.get(measure, measure)}{separator}{domain}"


def meanings() -> dict[str, str]:
    """Return what each measure means, by its English name, in the order of the report."""
    return {
        "bits per byte of documents": tr(
            "how well the base model predicts held-out documents; lower is better"
        ),
        "bits per byte of conversations": tr(
            "the same after midtraining, on held-out conversations, which are easier text"
        ),
        "bits per byte of answers in midtraining": tr(
            "the same after midtraining on the assistant's words alone"
        ),
        "bits per byte of answers": tr(
            "the same after fine-tuning, on the assistant's words alone; not comparable either"
        ),
        "bits per byte of answers of your own data": tr(
            "how well the fine-tuned model predicts the answers it was not shown"
        ),
        PREFERENCES: tr(
            "the share of held-out pairs in which the preferred answer "
            "has gained on the other one since before training"
        ),
        GENERAL_TEXT: tr(
            "how well the fine-tuned model still predicts text that is not in your data; a rise "
            "since before training, in the curve, is what it has forgotten"
        ),
        BASE_CORPUS: tr("the same texts after every stage; a rise is what the stage has forgotten"),
        "CORE": tr(
            "the mean of 22 tasks without a chat, each scaled so that guessing gives 0 and "
            "perfection gives 1"
        ),
        "ChatCORE": tr("the mean of the chat tasks, scaled in the same way"),
        "tinyworld_en": tr("open questions in English, in phrasings that training never showed"),
        "tinyworld_zh": tr("open questions in Chinese, in phrasings that training never showed"),
        "calculator": tr(
            "sums for which the model must call its calculator, with numbers that training never "
            "showed"
        ),
        "mental": tr(
            "sums without the calculator, with numbers that training never showed; RL trains these"
        ),
        "held_out_combinations_en": tr(
            "questions in English about facts that documents state and no training question asks"
        ),
        "held_out_combinations_zh": tr("as {name}, in Chinese", name="held_out_combinations_en"),
        "follow_ups_en": tr(
            "later questions of a conversation in English that need the turns before, in pairs "
            "that training never showed; a right answer is a sentence that names the thing"
        ),
        "follow_ups_zh": tr("as {name}, in Chinese", name="follow_ups_en"),
        "storytelling_en": tr(
            "stories in English on request, a third of them about things of which no story of "
            "training tells; right if every sentence is sound and all facts agree"
        ),
        "storytelling_zh": tr("as {name}, in Chinese", name="storytelling_en"),
        "persona_en": tr(
            "questions in English about the model itself, in wordings that training never showed"
        ),
        "persona_zh": tr("as {name}, in Chinese", name="persona_en"),
    }


def training_figures() -> dict[str, str]:
    """Return the names of the figures of a training stage that a comparison shows."""
    return {
        "parameters": tr("parameters"),
        "steps": tr("training steps"),
        "last_loss": tr("last training loss"),
        "tokens_per_second": tr("tokens a second"),
        "mfu_percent": tr("MFU in percent"),
        "minutes": tr("minutes of training"),
        "skipped_updates": tr("skipped updates"),
    }


def total_cost(total: Mapping[str, Any]) -> str:
    """Return the time of a run and, where a script measured them, its CPU time and memory."""
    time = duration(60 * total["minutes"])
    if not total["cpu_minutes"]:
        return tr("{time} of training", time=time)
    return tr(
        "{time}, {cpu_time} of CPU time, at most {memory:.2f} GB of memory",
        time=time,
        cpu_time=duration(60 * total["cpu_minutes"]),
        memory=total["memory_gb"],
    )
