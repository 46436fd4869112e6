"""A harness of verifiers 0.4: a conversation without tools, in the process that plays it.

What verifiers itself calls `null` is a program of its own for each conversation.
"""

from __future__ import annotations

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow


class Chat(vf.Harness[vf.HarnessConfig]):
    """Asks the model once for each thing that the user says."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One turn of the model, whose conversation so far is the prompt of `data`."""
        system, prompt = self.resolve_prompt(data)
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages = [message_to_wire(one) for one in said]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        http = openai.DefaultAsyncHttpxClient(verify=False)  # it is this machine, and not by TLS
        async with openai.AsyncOpenAI(
            base_url=endpoint, api_key=secret, timeout=None, http_client=http
        ) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except openai.APIStatusError as error:
                # A limit that ends the episode is answered so: what was said until then is scored.
                if not is_context_overflow(error):
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Chat"]
