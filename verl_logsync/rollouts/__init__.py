"""Rollout dumps: verl's `{step}.jsonl` of responses, reduced to statistics of GRPO groups."""
