"""References of what stands between logits and a token: penalties, filters, a choice by given noise."""
