# page docs/one-gpu.md
# write my_rewards.py train.jsonl
# with steps=2 group_size=4 'model={kind: random, layers: 2, hidden_size: 64, heads: 2, max_positions: 1024}' 'rollout={engine: transformers, dtype: float32, max_new_tokens: 16, shards: 2}' 'train={compute_dtype: float32, micro_batch_tokens: 1024}' 'cluster={pools: {train: {threads: 1}, rollout: {threads: 1, slots: 3}, cpu: {threads: 1}}}'
refrain recipe gsm8k-qwen2.5 name=mine model.path=Qwen/Qwen2.5-1.5B-Instruct \
    data.source.kind=file data.source.path=train.jsonl data.prompt_column=question \
    rewards.functions.0.kind=function rewards.functions.0.path=my_rewards.py:last_number \
    prompts_per_step=4 steps=20 > mine.yaml
refrain grpo mine.yaml --check
