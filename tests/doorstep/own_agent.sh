# page docs/own-agent.md
# write agent.py
refrain grpo tiny steps=2 data.source.kind=function data.source.path=agent.py:rows \
    episodes.environment.kind=agent episodes.environment.path=agent.py:solve \
    episodes.max_turns=2 episodes.max_turn_tokens=8 episodes.full_turn=counts \
    rollout.max_new_tokens=48 'rewards.functions=[{kind: environment}]' rewards.on_failure=complete
refrain samples RUN --best
