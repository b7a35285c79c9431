from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0003_login_counts'),
        ('catalog', '0013_several_devices'),
        ('jobs', '0015_jobs_by_model_and_dataset'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.RemoveIndex(
            model_name='job',
            name='job_claims',
        ),
        migrations.AddField(
            model_name='attempt',
            name='devices',
            field=models.JSONField(default=list),
        ),
        migrations.AddField(
            model_name='job',
            name='need_devices',
            field=models.PositiveSmallIntegerField(default=1),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(fields=['state', '-priority', 'turn', 'created_at', 'id', 'kind', 'need_device_kind', 'need_devices', 'need_device_bytes', 'project'], name='job_claims'),
        ),
    ]
