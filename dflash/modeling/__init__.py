"""Masks, the drafter, its loss, the target, and the format of a released drafter."""
