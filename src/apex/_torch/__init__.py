"""All contact with what torch keeps private or changes from release to release.

Each private name is used in one file, beside its plain form where there can be one. Copies between
devices are here, too: which of them may go unwaited for is torch's business.
"""
