"""The trainer's page: live curves of a job, without a build step or anything from elsewhere."""
