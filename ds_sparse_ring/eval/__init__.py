"""Evaluation by lm-eval: RULER and perplexity of long books, with dense or sparse attention, from files alone."""
