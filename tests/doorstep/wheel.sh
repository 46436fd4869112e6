# page docs/install.md
refrain
# page docs/recipes.md
refrain recipe
refrain recipe gsm8k-qwen2.5-1.5b > mine.yaml
# page docs/algorithms.md
# with tiny steps=1
refrain grpo
