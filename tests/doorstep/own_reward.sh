# page docs/own-reward.md
# write my_rewards.py train.jsonl
refrain grpo tiny steps=2 data.source.kind=file data.source.path=train.jsonl \
    data.prompt_column=question rewards.functions.0.path=my_rewards.py:exact
refrain samples RUN --best
