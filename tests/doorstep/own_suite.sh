# page docs/own-reward.md
# write my_rewards.py train.jsonl
# page docs/evaluation.md
refrain grpo tiny steps=2 evaluation.every=1 evaluation.before=true \
    'evaluation.suites.mine.source={kind: file, path: train.jsonl}' \
    'evaluation.suites.mine.rewards.functions=[{kind: function, path: "my_rewards.py:exact"}]'
refrain samples RUN --evaluation mine@2 --worst
refrain evaluate RUN --suite mine --versions 0,2
