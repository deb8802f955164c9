"""Examines GPUs and their driver, with nvidia-smi."""

from __future__ import annotations

import re
import shutil
from typing import NamedTuple

from .finding import Finding, dotted, numbers, output

OLDEST = 70  # msops' kernels need sm_70
SECONDS = 10  # limit for nvidia-smi, which hangs if the driver does


class Card(NamedTuple):
    """A GPU. `capability` is 90 for sm_90, and 0 for a driver before 510, which does not tell it."""

    driver: str
    capability: int
    name: str


class Gpus(NamedTuple):
    """All GPUs. `cuda` is the newest CUDA whose programs the driver runs, or () if it is unknown."""

    cards: list[Card]
    cuda: tuple[int, ...]
    said: str

    @property
    def usable(self) -> bool:
        return any(not card.capability or card.capability >= OLDEST for card in self.cards)

    @property
    def capabilities(self) -> list[int]:
        """Returns the known capabilities for which msops has kernels, oldest first."""
        return sorted({card.capability for card in self.cards if card.capability >= OLDEST})


def look() -> Gpus:
    said = output("nvidia-smi", seconds=SECONDS)
    told = re.search(r"CUDA Version: *(\d+\.\d+)", said)
    cards: list[Card] = []
    for fields in ("driver_version,compute_cap,name", "driver_version,name"):
        if not cards and "no answer" not in said:
            text = output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", seconds=SECONDS)
            found = re.findall(r"^(\d[\d.]+), (?:(\d+)\.(\d), )?(.+)$", text, re.MULTILINE)
            cards = [Card(driver, int(major + minor or 0), name) for driver, major, minor, name in found]
    return Gpus(cards, numbers(told[1]) if told else (), said)


def finding(gpus: Gpus) -> Finding:
    if not shutil.which("nvidia-smi"):
        return Finding("driver", "none", "no nvidia-smi on the PATH, so no GPU")
    if not gpus.cards:
        said = " ".join(gpus.said.split())[:200]
        # Only a new start of the machine helps here. It may be another person's, too, so that no command does it.
        hangs = "version mismatch" in said or "no answer" in said
        text = f"nvidia-smi finds no GPU: {said}{'; this stays so until the machine starts anew' * hangs}"
        lost = "communicate with the NVIDIA driver" in said
        return Finding("driver", "wrong", text, ("modprobe nvidia  # as root",) if lost else ())
    names = ", ".join(f"{card.name} (sm_{card.capability or '?'})" for card in gpus.cards)
    text = f"{gpus.cards[0].driver} for CUDA up to {dotted(gpus.cuda) or '?'}; {names}"
    if not gpus.usable:  # no command mends this, so the other findings treat it as no GPU
        return Finding("driver", "wrong", f"{text}: must be sm_{OLDEST} or newer")
    return Finding("driver", "ok", text)
