# page docs/episodes.md
# write cards.py
refrain grpo tiny steps=2 data.source.kind=function data.source.path=cards.py:rows \
    episodes.environment.kind=gymnasium episodes.environment.id=Blackjack-v1 \
    episodes.environment.codec=cards.py:Cards episodes.max_turns=8 episodes.max_turn_tokens=1 \
    episodes.full_turn=counts rollout.max_new_tokens=96 'rewards.functions=[{kind: environment}]'
# page docs/own-environment.md
refrain samples RUN --best
