"""An agent with two sub-agents that work at once, and a history that it replaces by a summary.

One sub-agent is to write digits, the other letters. Each has a conversation of its own, and a reward:
with episodes.credit = branch its tokens are compared with those of the same one alone.
"""

import asyncio
from collections.abc import Callable

import httpx


async def lead(base_url: str, api_key: str, question: str) -> dict[str, float]:
    """Two rounds of both sub-agents, each followed by a summary that the model writes."""
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=None, verify=False) as client:

        async def ask(messages: list[dict[str, str]], branch: str = "") -> str:
            body = {"messages": messages, "metadata": {"branch": branch}}
            answer = await client.post(f"{base_url}/chat/completions", json=body)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"])

        async def work(name: str, task: str) -> str:
            chat = [{"role": "system", "content": name}, {"role": "user", "content": task}]
            written = ""
            for more in ("more", "end"):
                said = await ask(chat, name)
                written += said
                chat += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]
            return written

        known, digits, letters = question, "", ""
        for _ in range(2):
            chat = [{"role": "system", "content": "lead"}, {"role": "user", "content": known}]
            plan = await ask(chat)
            found = await asyncio.gather(work("digits", plan), work("letters", plan))
            digits, letters = digits + found[0], letters + found[1]
            chat += [{"role": "assistant", "content": plan}]
            chat += [{"role": "user", "content": " ".join(found)}]
            known = await ask(chat)  # all that the next round knows of this one
    return {
        "": share(known, str.isalnum),
        "digits": share(digits, str.isdigit),
        "letters": share(letters, str.isalpha),
    }


def share(text: str, wanted: Callable[[str], bool]) -> float:
    """Of the characters of a text, those that are wanted; 0 of none."""
    return sum(map(wanted, text)) / len(text) if text else 0.0


def rows(size: int = 64) -> list[dict[str, str]]:
    """Tasks that differ in nothing but their number."""
    return [{"question": f"task {number}"} for number in range(size)]
